#pragma once

#include <CLI/CLI.hpp>
#include <optional>
#include <string>
#include <vector>

#include "cli/language_folder.h"
#include "eval/perplexity.h"
#include "sparsity/calibration.h"

/// The flags of commands that calibrate a language model on one text and measure it on another.

namespace tessera::cli {

/// Why a flag of the perplexity is refused.
inline constexpr const char* kNoPerplexity =
    "is for the perplexity, of which there is none without --eval-text or --validation; leave it out";

struct CalibrationFlags {
  std::string data;
  std::vector<std::string> text, eval_text;
  std::optional<int64_t> length;
  double validation = 0.1;
  sparsity::SampleOptions samples;
  int64_t eval_windows = 0;
  bool any_bytes = false;

  /// The texts of the calibration, and the samples of them, but for their seed.
  void add_samples_to(CLI::App& command);
  /// And the rest.
  void add_to(CLI::App& command);
  bool has_text() const { return !text.empty() || !data.empty(); }
  bool has_evaluation() const { return !eval_text.empty() || (has_text() && validation > 0); }
  /// Sets samples.length: `length`, or 2048, or what the model takes. `command` begins the message if that is
  /// too much for the model.
  void choose_length(const char* command, const pretrained::LoadedLanguageModel& language);

  struct Texts {
    std::vector<int64_t> calibration, evaluation;
  };
  Texts read(const char* command, const pretrained::LoadedLanguageModel& language) const;
};

}  // namespace tessera::cli
