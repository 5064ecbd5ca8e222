#include <fmt/format.h>

#include <chrono>
#include <nlohmann/json.hpp>
#include <span>

#include "cli/eval.h"
#include "cli/language_tokens.h"
#include "eval/choice.h"
#include "io/file.h"
#include "io/utf8.h"
#include "runtime/interrupt.h"

namespace tessera::cli {
namespace {

struct ChoiceArgs {
  std::string file, model, dtype, device, predictions;
  SparseFlags sparse;
  int64_t most = 0, batch = 16;
  bool json = false;
};

/// Accuracies by the sum of log-likelihoods and by its mean per byte.
struct ChoiceResult {
  eval::Accuracy by_sum, by_byte;
  double chance = 0;  // the mean of 1 / choices
  int64_t cut = 0;    // texts that were longer than the model
};

ChoiceResult run_items(const ChoiceArgs& args, const pretrained::LoadedLanguageModel& language,
                       const io::Tokenizer& tokenizer, const std::vector<eval::ChoiceItem>& items,
                       Device device) {
  ChoiceResult result;
  std::string lines;
  const auto encode = [&](const std::string& text) {
    const std::vector<int32_t> ids = tokenizer.encode(text).ids;
    check_vocabulary(language, ids, tokenizer.path());
    return std::vector<int64_t>(ids.begin(), ids.end());
  };
  const int64_t most = language.model.longest();
  for (size_t begin = 0; begin < items.size(); begin += size_t(args.batch)) {
    check_interrupt();
    const auto group = std::span(items).subspan(begin, std::min(size_t(args.batch), items.size() - begin));
    std::vector<eval::ChoiceText> texts;
    for (const eval::ChoiceItem& item : group)
      for (size_t i = 0; i < item.choices.size(); ++i) {
        texts.push_back(eval::choice_text(item, i, encode, most, language.first_token()));
        result.cut += int64_t(texts.back().tokens.size()) - 1 == most;
      }
    const eval::ChoiceScores scores =
        language.model.visit([&](const auto& model) { return eval::score_choices(model, texts, device); });
    size_t first = 0;
    for (const eval::ChoiceItem& item : group) {
      const auto of_item = [&](const std::vector<double>& all) {
        return std::vector<double>(all.begin() + std::ptrdiff_t(first),
                                   all.begin() + std::ptrdiff_t(first + item.choices.size()));
      };
      const std::vector<double> sums = of_item(scores.sums);
      const int64_t chosen = eval::best_choice(sums), by_byte = eval::best_choice(of_item(scores.per_byte));
      first += item.choices.size();
      ++result.by_sum.items, ++result.by_byte.items;
      result.by_sum.right += chosen == item.answer, result.by_byte.right += by_byte == item.answer;
      result.chance += 1 / double(item.choices.size());
      if (!args.predictions.empty())
        lines += nlohmann::json{{"answer", item.answer},
                                {"chosen", chosen},
                                {"chosen_per_byte", by_byte},
                                {"log_likelihoods", sums}}
                     .dump() +
                 "\n";
    }
  }
  result.chance /= double(items.size());
  if (!args.predictions.empty()) io::write_file(args.predictions, lines);
  return result;
}

nlohmann::json accuracy_json(const eval::Accuracy& accuracy) {
  return {{"accuracy", accuracy.share()},
          {"right", accuracy.right},
          {"interval_95", {accuracy.low(), accuracy.high()}}};
}

int eval_choice(const ChoiceArgs& args) {
  if (!args.predictions.empty()) {
    check_replaceable(args.predictions);
    check_not_input(args.predictions, {args.file, args.model, args.sparse.gates});
  }
  std::vector<eval::ChoiceItem> items = eval::read_choices(args.file);
  if (args.most > 0 && args.most < int64_t(items.size())) items.resize(size_t(args.most));
  const Device device = args.device.empty() ? Device::best() : Device::parse(args.device);
  auto sparse = args.sparse.options(language_folder(args.model), 1);
  if (sparse) sparse->whole_texts = true;
  const pretrained::LoadedLanguageModel language = load_language(args.model, device, args.dtype, sparse);
  const io::Tokenizer tokenizer = io::Tokenizer::load(language.folder);
  const InterruptGuard interrupts(kGivingUp);
  const auto begin = std::chrono::steady_clock::now();
  const ChoiceResult result = run_items(args, language, tokenizer, items, device);
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  if (args.json) {
    fmt::print("{}\n", io::json_text({{"model", language.folder},
                                      {"file", args.file},
                                      {"items", items.size()},
                                      {"chance", result.chance},
                                      {"by_likelihood", accuracy_json(result.by_sum)},
                                      {"by_likelihood_per_byte", accuracy_json(result.by_byte)},
                                      {"texts_cut", result.cut},
                                      {"sparse", sparse_json(language.sparse, {})},
                                      {"seconds", seconds}},
                                     2));
    return 0;
  }
  const auto line = [&](const char* name, const eval::Accuracy& accuracy) {
    const char* const verdict = accuracy.low() > result.chance    ? "above chance"
                                : accuracy.high() < result.chance ? "below chance"
                                                                  : "within chance";
    fmt::print("{:<24} {:.4f}  [{:.4f}, {:.4f}]  {}\n", name, accuracy.share(), accuracy.low(),
               accuracy.high(), verdict);
  };
  fmt::print("{:<24} {}\n{:<24} {:.4f}\n", "items", items.size(), "chance", result.chance);
  line("by likelihood", result.by_sum);
  line("by likelihood per byte", result.by_byte);
  if (result.cut > 0)
    fmt::print("{} texts have as many tokens as the model takes, or were cut to that\n", result.cut);
  return 0;
}

}  // namespace

void add_eval_choice(CLI::App& eval, Action& action) {
  auto* command = eval.add_subcommand("choice", "Measure the multiple-choice accuracy of a language model");
  auto args = std::make_shared<ChoiceArgs>();
  command->footer(
      "Picks the choice with the highest log-likelihood after the context; prints accuracies with 95 % "
      "intervals (Wilson)\nnext to the chance level. A line of the file:\n  {\"context\": \"The capital of "
      "France is\", \"choices\": [\" Paris\", \" Rome\"], \"answer\": 0}\n\nExample:\n  tessera eval choice "
      "questions.jsonl --model llama");
  command->add_option("FILE", args->file, "Items, one JSON object per line")->required();
  command->add_option("--model", args->model, "Hugging Face model directory, or run folder of a finished run")
      ->required();
  command->add_option("--items", args->most, "Number of items to evaluate, from the first; 0: all")
      ->check(whole(0, int64_t{1} << 40));
  command->add_option("--batch-size", args->batch, "Items that run at once")->check(whole(1, 1 << 16));
  command->add_option("--predictions", args->predictions,
                      "Write the chosen answers to this file, one JSON object per item");
  command->add_option("--dtype", args->dtype, "Dtype of the weights; default: the file's, on the CPU f32")
      ->check(CLI::IsMember({"f32", "bf16", "f16"}));
  add_device(*command, args->device);
  args->sparse.add_to(*command);
  command->add_flag("--json", args->json, "Print the result as JSON");
  command->callback([&action, args] { action = [args] { return eval_choice(*args); }; });
}

}  // namespace tessera::cli
