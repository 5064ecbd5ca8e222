#include "cli/calibration_flags.h"

#include "cli/commands.h"
#include "cli/language_tokens.h"

namespace tessera::cli {

void CalibrationFlags::add_samples_to(CLI::App& command) {
  auto* const option =
      command.add_option("--text", text, "Text files for calibration, joined by blank lines");
  add_any_bytes(command, any_bytes);
  command.add_option("--data", data, "Directory of token shards, instead of --text")->excludes(option);
  command.add_option("--samples", samples.count, "Number of calibration samples")->check(whole(1, 1 << 24));
  command
      .add_option("--length", length,
                  "Tokens per sample and window; default: 2048, or the model's maximum if that is less")
      ->check(whole(2, 1 << 24));
}

void CalibrationFlags::add_to(CLI::App& command) {
  add_samples_to(command);
  auto* const evaluation = command.add_option("--eval-text", eval_text,
                                              "Text files for the perplexity; default: the end of --text");
  command
      .add_option("--validation", validation,
                  "Share of --text, at its end, held out for the perplexity; 0: none")
      ->check(kFinite)
      ->check(between(0, 0.9))
      ->excludes(evaluation);
  command.add_option("--eval-windows", eval_windows, "Maximum number of windows for the perplexity; 0: all")
      ->check(kDecimal)
      ->check(CLI::Range(0, 1 << 30));
  command.add_option("--seed", samples.seed, "Random seed for choosing the samples")->check(kDecimal);
}

void CalibrationFlags::choose_length(const char* command, const pretrained::LoadedLanguageModel& language) {
  const int64_t longest = language.model.longest();
  samples.length = length.value_or(std::min(samples.length, longest));
  check(samples.length <= longest, command, ": samples of ", samples.length, " tokens; the model has ",
        longest, " ", limit_of(language.model), ": give a smaller --length");
}

CalibrationFlags::Texts CalibrationFlags::read(const char* command,
                                               const pretrained::LoadedLanguageModel& language) const {
  Texts texts;
  if (!data.empty()) {
    texts.calibration = tokens_of_shards(command, language, data, "train").ids;
    if (eval_text.empty() && validation > 0)
      texts.evaluation = tokens_of_shards(command, language, data, "validation").ids;
  } else if (!text.empty()) {
    texts.calibration = tokens_of_text(language, text, any_bytes).ids;
    if (eval_text.empty() && validation > 0) {
      const size_t held = size_t(double(texts.calibration.size()) * validation);
      texts.evaluation.assign(texts.calibration.end() - int64_t(held), texts.calibration.end());
      texts.calibration.resize(texts.calibration.size() - held);
    }
  }
  if (!eval_text.empty()) texts.evaluation = tokens_of_text(language, eval_text, any_bytes).ids;
  return texts;
}

}  // namespace tessera::cli
