#include <fmt/format.h>

#include <cmath>
#include <filesystem>
#include <optional>

#include "cli/language_flags.h"
#include "cli/train_run.h"
#include "io/checkpoint_folder.h"
#include "ops/attention/attention.h"
#include "pretrained/config.h"
#include "runtime/allocator.h"
#include "runtime/error.h"
#include "runtime/parallel.h"
#include "train/language_plan.h"

namespace tessera::cli {
namespace {

namespace fs = std::filesystem;

/// More would take the n-gram's tables beyond 2 GB.
constexpr uint64_t kMostCounted = uint64_t{1} << 23;

bool given(const CLI::App& command, const char* flag) {
  const CLI::Option* const option = command.get_option_no_throw(flag);
  return option && option->count() > 0;
}

class TrainedLanguage : public TrainedModel {
 public:
  explicit TrainedLanguage(bool llama) : flags(llama), llama_(llama) {}
  LanguageFlags flags;
  train::LanguageWatch watch;

  const char* name() const override { return llama_ ? "llama" : "gpt"; }
  train::SettingList options() override { return watch.list(); }
  train::SettingList settings() override { return job_.list(); }

  void from_flags(const CLI::App& command, Device device) override {
    const auto together = [&](const char* a, const char* b, const char* why) {
      if (given(command, a) && given(command, b)) throw UsageError(fmt::format("{} and {}: {}", a, b, why));
    };
    if (flags.text.files.empty() && flags.settings().data.empty())
      throw UsageError("what to train on is not given: --text FILE... or --data DIR");
    together("--text", "--data", "one or the other");
    for (const char* of_text : {"--tokenizer-kind", "--vocab-size"}) {
      together(of_text, "--data", "the tokens are made already");
      together(of_text, "--tokenizer", "it is made already");
      together(of_text, "--model", "the model's tokenizer is used");
    }
    together("--validation", "--data", "the shards are split already");
    together("--piece", "--data", "the shards are split already");
    together("--any-bytes", "--data", "the tokens are made already");
    if (given(command, "--vocab-size") && flags.text.kind != "bpe")
      throw UsageError("--vocab-size: of --tokenizer-kind bpe only; a " + flags.text.kind +
                       " tokenizer has as many tokens as it needs");
    for (const char* size : {"--size", "--layers", "--d-model", "--n-head", "--kv-heads", "--d-ff", "--tied",
                             "--untied", "--dropout"})
      together("--model", size, "the folder says what the model is");
    together("--steps", "--epochs", "one or the other");
    together("--steps", "--minutes", "one or the other");
    together("--epochs", "--minutes", "one or the other");
    for (const char* of_samples : {"--sample-prompt", "--sample-every"})
      if (watch.sample_tokens == 0 && given(command, of_samples))
        throw UsageError(std::string(of_samples) + ": with --sample-tokens 0 there are no samples");
    if (watch.patience > 0 && command.get_option("--eval-every")->as<int64_t>() == 0)
      throw UsageError("--patience: without --eval-every there is one evaluation, at the end");
    note_evaluation(command);
    if (!flags.settings().data.empty()) check_kept_text("--data", fs::absolute(flags.settings().data));
    job_ = flags.job();
    job_.set_precision(flags.precision.on(device));
    if (job_.start.empty()) return;
    const std::string path = job_.start;
    check_kept_text("--model", fs::absolute(path));
    const pretrained::Config config = pretrained::read_config(path);
    if (llama_ ? !std::holds_alternative<models::LlamaConfig>(config.model)
               : !std::holds_alternative<models::GptConfig>(config.model))
      throw UsageError("--model: " + path + " is a model of the type " + config.type + "; expected " +
                       (llama_ ? "llama" : "gpt2 or opt"));
    if (const auto* model = std::get_if<models::LlamaConfig>(&config.model)) job_.model = *model;
    if (const auto* model = std::get_if<models::GptConfig>(&config.model)) job_.model = *model;
    job_.set_precision(flags.precision.on(device));
    job_.start = fs::absolute(path).lexically_normal().string();
    job_.validate();
  }

  void from_settings(const std::string& path, const nlohmann::json& settings,
                     const CLI::App& command) override {
    check(settings.contains("job"), path, ": it has no \"job\"; not a run of `train ", name(), "`");
    try {
      job_ = train::language_settings_from_json(settings["job"]);
    } catch (const Error& error) {
      fail_at(Site::here(), path, ": ", error.what());
    }
    check(job_.is_llama() == llama_, path, ": a run of `train ", job_.family(), "`, not of `train ", name(),
          "`");
    if (command.get_option("--steps")->count() > 0) job_.steps = flags.settings().steps;
    note_evaluation(command);
  }

  std::string default_name() const override { return name(); }

  void prepare(const train::RunFolder& run, Device device, bool resumed) override {
    const std::string own = (run.path() / "data").string();
    bool restart = !resumed;
    if (!resumed) {
      make_data(own);
    } else {
      restart = io::CheckpointFolder(run.checkpoints().string()).steps().empty();
    }
    if (const int64_t since = resumed ? train::best_evaluation(run).since : 0;
        watch.patience > 0 && since >= watch.patience) {
      std::error_code ignored;
      check(!fs::exists(run.path() / "report.html", ignored), "train: the run in ", run.path().string(),
            " has ended after step ", run.metrics().back().step, ", ", since,
            " evaluations after its lowest held-out loss; give a larger --patience to go further");
    }
    open_data(own);
    const std::string& fingerprint = data_->tokenizer().fingerprint();
    if (!resumed) job_.fingerprint = fingerprint;
    check(job_.fingerprint == fingerprint, "train: the tokenizer in ", own, " has the fingerprint ",
          fingerprint, "; the run's had ", job_.fingerprint);
    if (watch.sample_tokens > 0)
      train::sample_prompt(*data_, watch);  // complains now, not at the first sample
    watch.eval_stride = train::evaluation_stride(job_, watch);
    check(watch.exported == "last" || watch.exported == "best", "train: --export is \"", watch.exported,
          "\"; expected last or best");
    held_out_ = train::held_out(*data_, watch.eval_tokens);
    check(held_out_.targets > 0 || (watch.exported == "last" && watch.patience == 0),
          "train: nothing is held out, so no evaluation is the best one: --patience and --export best need a "
          "--validation share");
    check(held_out_.targets > 0 || wants_evaluation_.empty(), "train: nothing is held out, so ",
          wants_evaluation_, " has nothing to evaluate; give a --validation share, or leave it out");
    if (held_out_.targets > 0 && watch.ngram > 0)
      baseline_ = train::ngram_baseline(*data_, int(watch.ngram), held_out_, kMostCounted);
    if (!resumed) {
      set_steps(device);
      // Read more than once, a text is better cut elsewhere each time.
      if (job_.stride == 0) job_.stride = epochs() > 1 ? 1 : job_.length;
      open_data(own);
    }
    session_.emplace(job_, device, restart ? job_.start : std::string());
    session_->set_data(*data_, watch, held_out_, baseline_);
  }

  nlohmann::json job() const override { return train::to_json(job_); }
  nlohmann::json facts() const override {
    nlohmann::json facts = nlohmann::json::object();
    if (held_out_.targets > 0)
      facts["evaluation"] = {{"protocol", "sliding"},
                             {"length", job_.length},
                             {"stride", watch.eval_stride},
                             {"targets", held_out_.targets},
                             {"behind_training_part", held_out_.continued}};
    if (baseline_.order > 0)
      facts["baseline"] = {{"method", "interpolated modified Kneser-Ney"},
                           {"order", baseline_.order},
                           {"nll", baseline_.nll},
                           {"tokens", baseline_.trained},
                           {"ngrams", baseline_.ngrams}};
    return facts;
  }
  DType dtype() const override { return job_.dtype(); }
  int64_t steps() const override { return job_.steps; }
  optim::Schedule schedule() const override { return job_.make_schedule(); }
  int64_t restore(const fs::path& checkpoint) override { return session_->restore(checkpoint); }

  void print_header(const train::RunFolder& run, bool graph, int64_t first_step) const override {
    const Device device = session_->device();
    const bool captured = graph && !job_.documents;
    fmt::print("{} on {} ({}), {}{}\n", name(), device.name(), device.card().name, name_of(job_.precision()),
               device.is_cuda() ? captured ? ", one captured graph a step" : ", eager" : "");
    std::visit(
        [&](const auto& m) {
          std::string heads = fmt::format("{} heads", m.heads);
          if constexpr (requires { m.kv_heads; })
            if (m.kv_heads != m.heads) heads += fmt::format(" ({} of keys)", m.kv_heads);
          const double dropped = ops::applied_dropout(m.attention_dropout);
          fmt::print(
              "  model     {} parameters: {} blocks, d {}, {}, d_ff {}, {} tokens{}{}\n",
              train::format_count(double(train::count_parameters(job_.model))), m.layers, m.d_model, heads,
              m.d_ff, m.vocabulary,
              dropped > 0 ? fmt::format(", dropout of {:.4g} of the attention probabilities", dropped) : "",
              job_.start.empty() ? "" : fmt::format(", from {}", job_.start));
        },
        job_.model);
    fmt::print("  data      {} tokens to train{}, {}; sequences of {}, {} tokens a step\n",
               train::format_count(double(data_->train().tokens())),
               data_->validation()
                   ? fmt::format(", {} held out", train::format_count(double(data_->validation()->tokens())))
                   : ", none held out",
               data_->tokenizer().kind(), job_.length, job_.tokens_per_step());
    fmt::print("  training  steps {} to {} ({:.1f} epochs), lr {:g} ({}), seed {}\n", first_step, job_.steps,
               epochs(), job_.lr, job_.schedule, job_.seed);
    fmt::print("  memory    {} planned a step\n",
               format_bytes(size_t(train::plan_memory(job_.model, job_.batch, job_.length).total())));
    if (held_out_.targets > 0)
      fmt::print("  held out  {} tokens to predict, {} at a time, each behind {} or more{}\n",
                 train::format_count(double(held_out_.targets)), watch.eval_stride,
                 job_.length - watch.eval_stride + 1,
                 held_out_.continued  ? "; a document goes on behind its training part"
                 : data_->documents() ? "; each document alone"
                                      : "; one document behind the other");
    if (baseline_.order > 0)
      fmt::print("  baseline  {}-gram: {:.4f} nats a token{}\n", baseline_.order, baseline_.nll,
                 baseline_.trained < data_->train().tokens()
                     ? fmt::format(" (counted on {} tokens)", train::format_count(double(baseline_.trained)))
                     : "");
    fmt::print("  run       {}\n", run.path().string());
  }

  train::Job& job_to_train(train::TrainerOptions& options) override {
    options.sample_every = watch.sample_every;
    return *session_;
  }
  void report(const train::RunFolder& run, const train::TrainResult& result) override {
    best_ = train::best_evaluation(run);
    if (best_.step > 0) {
      nlohmann::json settings = run.settings();
      settings["best"] = {{"step", best_.step}, {"eval_nll", best_.nll}, {"evaluations", best_.evaluations}};
      run.write_settings(settings);
    }
    if (result.outcome == train::Outcome::finished) {
      if (watch.exported == "best" && best_.step != result.step)
        session_->restore(io::CheckpointFolder(run.checkpoints().string()).file_of(best_.step));
      train::export_language(*session_, *data_, (run.path() / "data").string(),
                             (run.path() / "model").string());
    }
    train::write_language_report(run, *session_, result);
  }
  nlohmann::json throughput(const train::TrainResult& result) const override {
    const double seconds = result.ms_per_step / 1e3;
    const double flops = train::count_flops(job_.model, job_.batch * job_.accumulate, job_.length).step();
    return {{"tflops", seconds > 0 ? flops / seconds / 1e12 : 0.0}};
  }
  void print_end(const train::RunFolder& run, const train::TrainResult& result) const override {
    const auto& e = result.evaluation;
    if (const auto nll = e.find("eval_nll"); nll != e.end()) {
      fmt::print("held-out text: {:.4f} nats a token (perplexity {:.2f}), {:.4f} bits a byte\n", nll->second,
                 e.at("eval_perplexity"), e.at("eval_bits_per_byte"));
      if (baseline_.order > 0)
        fmt::print(
            "{}-gram on it: {:.4f} nats a token (perplexity {:.2f}), {:.4f} bits a byte; "
            "the model is {:.4f} nats a token {}\n",
            baseline_.order, baseline_.nll, std::exp(baseline_.nll), e.at("ngram_bits_per_byte"),
            std::abs(e.at("eval_gap")), e.at("eval_gap") <= 0 ? "better" : "worse");
    }
    // Picked on the text that it is measured on, it is an optimistic figure, so it stands apart.
    if (best_.evaluations > 1)
      fmt::print("lowest of {} evaluations: {:.4f} nats a token, after step {}{}\n", best_.evaluations,
                 best_.nll, best_.step, result.step < job_.steps ? "; the run ended early (--patience)" : "");
    if (watch.sample_tokens > 0)
      if (const auto samples = run.samples(); !samples.empty())
        fmt::print("it writes:\n{}\n", samples.back().text);
    fmt::print("model: {}{}\n", fs::absolute(run.path() / "model").lexically_normal().string(),
               watch.exported == "best"
                   ? fmt::format(" (of step {}, chosen on the held-out text)", best_.step)
                   : "");
  }

 private:
  /// The first flag given that is nothing without held-out text, of which prepare() knows.
  void note_evaluation(const CLI::App& command) {
    for (const char* flag : {"--eval-every", "--eval-stride", "--ngram"})
      if (wants_evaluation_.empty() && given(command, flag) && command.get_option(flag)->as<int64_t>() > 0)
        wants_evaluation_ = flag;
  }
  /// Shards and tokenizer in the run's folder, or the tokenizer alone if the shards lie elsewhere.
  void make_data(const std::string& own) {
    if (const std::string given = job_.data; !given.empty()) {
      job_.data = fs::absolute(given).lexically_normal().string();
      check(fs::is_directory(job_.data), "train: --data: ", given,
            " is no folder; tessera data tokenize makes one of text");
      train::copy_tokenizer(!flags.text.tokenizer.empty() ? flags.text.tokenizer : job_.data, own);
    } else {
      train::LanguageText text = flags.text;
      if (text.tokenizer.empty() && !job_.start.empty()) text.tokenizer = job_.start;
      const datasets::Tokenized done = train::write_language_data(text, own);
      tell_invalid(done.invalid, done.bytes);
    }
    const int64_t tokens = io::Tokenizer::load(own).vocab_size();
    std::visit(
        [&](auto& model) {
          if (job_.start.empty()) model.vocabulary = tokens;
          check(tokens <= model.vocabulary, "train: the tokenizer has ", tokens, " tokens, the model in ",
                job_.start, " has ", model.vocabulary);
        },
        job_.model);
  }
  void open_data(const std::string& own) {
    data_.emplace(job_.data.empty() ? own : job_.data, own, job_.length, job_.documents, job_.stride);
  }
  /// How often the run reads the text.
  double epochs() const {
    return double(job_.steps) * double(job_.tokens_per_step()) / double(data_->train().tokens());
  }
  void set_steps(Device device) {
    if (flags.epochs > 0)
      job_.steps = std::max<int64_t>(
          1, std::llround(flags.epochs * double(data_->train().tokens()) / double(job_.tokens_per_step())));
    if (flags.minutes > 0) job_.steps = train::steps_within(job_, device, flags.minutes * 60);
    job_.validate();
  }

  bool llama_;
  std::string wants_evaluation_;
  train::LanguageSettings job_;
  std::optional<train::LanguageData> data_;
  std::optional<train::LanguageJob> session_;
  train::HeldOut held_out_;
  train::BestEvaluation best_;
  train::NgramBaseline baseline_;
};

}  // namespace

void add_train_language(CLI::App& train, Action& action, bool llama) {
  const std::string name = llama ? "llama" : "gpt";
  auto* command = train.add_subcommand(name, llama ? "LLaMA on text, from scratch or from its weights"
                                                   : "GPT-2 on text, from scratch or from its weights");
  auto model = std::make_shared<TrainedLanguage>(llama);
  auto run = std::make_shared<RunFlags>();
  model->flags.add_training(*command, "demo");
  run->add_to(*command, name + "-<time>");
  add_flags(*command, model->watch.list());
  command->callback([&action, model, run, command] {
    action = [model, run, command] {
      apply_config(*command, run->config);
      check_not_input(run->json, model->flags.text.files);
      return run_train(*model, *run, *command);
    };
  });
}

}  // namespace tessera::cli
