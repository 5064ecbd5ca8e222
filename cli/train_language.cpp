#include <fmt/format.h>

#include <filesystem>

#include "cli/language_flags.h"
#include "cli/language_folder.h"
#include "cli/train_run.h"
#include "pretrained/config.h"
#include "train/language_run.h"

namespace tessera::cli {
namespace {

namespace fs = std::filesystem;

class LanguageCommand : public train::LanguageRecipe {
 public:
  explicit LanguageCommand(bool llama) : LanguageRecipe(llama), flags(llama) { on_invalid = tell_invalid; }
  LanguageFlags flags;

  const train::LanguageSettings& given_settings() const override { return flags.given_settings(); }

  void check_options(const train::TrainerOptions& options) const override {
    if (watch.patience > 0 && options.eval_every == 0)
      throw UsageError("--patience: without --eval-every there is one evaluation, at the end");
    if (watch.sample_tokens == 0 && !of_samples_.empty())
      throw UsageError(of_samples_ + ": with --sample-tokens 0 there are no samples");
  }

  void resume(const std::string& path, const nlohmann::json& run, const train::Given& given) override {
    note_samples(given);
    LanguageRecipe::resume(path, run, given);
  }

  void begin(const train::Given& given, Device device) override {
    const auto together = [&](const char* a, const char* b, const char* why) {
      if (given.contains(a) && given.contains(b)) throw UsageError(fmt::format("{} and {}: {}", a, b, why));
    };
    if (flags.text.files.empty() && flags.settings().data.empty())
      throw UsageError("there is no training data; give --text FILE... or --data DIR");
    for (const char* of_text : {"--tokenizer-kind", "--vocab-size"}) {
      together(of_text, "--data", "the data is tokenized already");
      together(of_text, "--tokenizer", "a given tokenizer is not trained");
      together(of_text, "--model", "the model's tokenizer is used");
    }
    together("--validation", "--data", "the shards are split already");
    together("--piece", "--data", "the shards are split already");
    together("--any-bytes", "--data", "the data is tokenized already");
    if (given.contains("--vocab-size") && flags.text.kind != "bpe")
      throw UsageError("--vocab-size: only for --tokenizer-kind bpe; a " + flags.text.kind +
                       " tokenizer has as many tokens as it needs");
    for (const char* size : {"--size", "--layers", "--d-model", "--n-head", "--kv-heads", "--head-dim",
                             "--type", "--d-ff", "--ffn", "--ffn-ratio", "--tied", "--untied", "--dropout"})
      together("--model", size, "the model directory defines the model");
    note_samples(given);
    note_evaluation(given);
    text = flags.text, epochs = flags.epochs, minutes = flags.minutes;
    if (!flags.settings().data.empty()) check_kept_text("--data", fs::absolute(flags.settings().data));
    settings_ = flags.job(given, device);
    if (!settings_.start.empty()) {
      take_model();
      settings_.set_precision(flags.precision.on(device));
      settings_.validate();
    }
    settings_.planned(device);  // throws for a --galore-rank that is too large
    settings_.check_required(device);
  }

 private:
  void take_model() {
    check_kept_text("--model", fs::absolute(settings_.start));
    const std::string path = language_folder(settings_.start);
    const pretrained::Config config = pretrained::read_config(path);
    if (is_llama() ? !std::holds_alternative<models::LlamaConfig>(config.model)
                   : !std::holds_alternative<models::GptConfig>(config.model))
      throw UsageError("--model: " + path + " is a model of the type " + config.type + "; expected " +
                       (is_llama() ? "llama, mistral, qwen2, qwen3, phi3 or arcee" : "gpt2 or opt"));
    if (const auto* model = std::get_if<models::LlamaConfig>(&config.model)) settings_.model = *model;
    if (const auto* model = std::get_if<models::GptConfig>(&config.model)) settings_.model = *model;
    settings_.start = fs::absolute(path).lexically_normal().string();
  }

  void note_samples(const train::Given& given) {
    for (const char* const flag : {"--sample-prompt", "--sample-every"})
      if (of_samples_.empty() && given.contains(flag)) of_samples_ = flag;
  }

  std::string of_samples_;  // the first given flag that has no effect without samples
};

}  // namespace

void add_train_language(CLI::App& train, Action& action, bool llama) {
  const std::string name = llama ? "llama" : "gpt";
  auto* command =
      train.add_subcommand(name, llama ? "Train LLaMA on text, from scratch or from a model directory"
                                       : "Train GPT-2 on text, from scratch or from a model directory");
  auto model = std::make_shared<LanguageCommand>(llama);
  auto run = std::make_shared<RunFlags>();
  model->flags.add_training(*command, "demo");
  command->get_option("--steps")->excludes("--epochs")->excludes("--minutes");
  command->get_option("--data")->excludes("--text");
  run->add_to(*command, name + "-<time>");
  add_flags(*command, model->watch.list());
  command->callback([&action, model, run, command] {
    action = [model, run, command] {
      apply_config(*command, run->config);
      model->eval_every = run->options.eval_every;
      return run_train(*model, *run, *command, model->flags.settings().list());
    };
  });
}

}  // namespace tessera::cli
