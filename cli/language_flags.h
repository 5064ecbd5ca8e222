#pragma once

#include "cli/commands.h"
#include "train/language_job.h"

namespace tessera::cli {

/// The flags that describe a GPT or a LLaMA, its data and its training, shared by train, bench step and plan.
class LanguageFlags {
 public:
  explicit LanguageFlags(bool llama);
  /// Sizes of model and batch, and its precision if `with_precision` (bench measures several).
  void add_sizes(CLI::App& command, const char* default_size, bool with_precision = true);
  /// The vocabulary; in `train` it is the tokenizer's.
  void add_vocabulary(CLI::App& command);
  /// Every setting of a training run: data, model, optimizer and schedule.
  void add_training(CLI::App& command, const char* default_size);
  /// The sizes that the flags say: those of --size, and what else is given in their place; the precision only
  /// for a given device, since benchmarks measure several.
  /// Of a job whose number of steps nothing says yet - by --epochs or --minutes, in plans and benchmarks - it
  /// is the largest.
  /// Throws UsageError for sizes that do not fit each other, and for flags that have no effect without
  /// another.
  train::LanguageSettings job(const train::Given& given, std::optional<Device> device = {}) const;

  /// For `train`: settings of the text, which are not part of the job.
  train::LanguageText text;
  double epochs = 0, minutes = 0;
  train::LanguageSettings& settings() { return job_; }
  const train::LanguageSettings& given_settings() const { return job_; }
  PrecisionFlag precision;

 private:
  train::SettingList model_list();
  train::SettingList text_list();
  train::LanguageSettings job_;
  void set_ffn(models::LlamaConfig& model) const;
  std::string size_, type_ = "llama", ffn_;
  double ffn_ratio_ = 0;
  int64_t vocabulary_ = 0, layers_ = 0, d_model_ = 0, heads_ = 0, kv_heads_ = 0, head_dim_ = 0, d_ff_ = 0;
  bool untied_ = false, tied_ = false, trains_ = false;
};

}  // namespace tessera::cli
