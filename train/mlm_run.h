#pragma once

#include <optional>

#include "train/glue_start.h"
#include "train/mlm_job.h"
#include "train/run.h"

/// `tessera train bert --task mlm`: a run from text to a Hugging Face model directory.

namespace tessera::train {

/// How a run begins, in addition to the settings of a fine-tuning run (GlueStart).
struct MlmStart {
  LanguageText text;
  MlmSettings settings;  // of which `mask` has a flag here
  /// Text, its tokenizer, and the share of masked tokens.
  SettingList list();
};

/// The settings that the flags say; vocabulary and steps follow from the text. Throws unless they go
/// together.
MlmSettings mlm_settings(const GlueStart& start, const MlmStart& text, const Given& given, Device device);

/// Settings of the evaluation.
struct MlmOptions {
  int64_t eval_tokens = 1 << 18;  // of the validation part, at most
  SettingList list();
};

class MlmRecipe : public Recipe {
 public:
  MlmRecipe(const GlueStart& start, const MlmStart& text, MlmOptions options)
      : start_(start), text_(text), options_(options) {}
  int64_t eval_every = 0;  // as the command says it for the trainer; what is asked for must be there
  /// Tells how many bytes of the text were not UTF-8.
  std::function<void(uint64_t invalid, uint64_t bytes)> on_invalid = [](uint64_t, uint64_t) {};

  const char* name() const override { return "bert"; }
  SettingList options() override { return options_.list(); }
  void begin(const Given& given, Device device) override;
  void resume(const std::string& path, const nlohmann::json& run, const Given& given) override;
  std::string default_name() const override { return "bert-mlm"; }
  void set_ranks(int ranks, const Given& given, bool resumed) override {
    settings_.set_ranks(ranks, given, resumed);
    ranks_ = ranks;
  }
  void spread(const optim::Sharding& sharding) override { settings_.sharding = sharding; }
  void prepare(const RunFolder& run, Device device, bool resumed) override;
  Job& job() override { return *job_; }
  const TrainingSettings& training() const override { return settings_; }
  DType dtype() const override { return settings_.bert.dtype; }
  nlohmann::json facts() const override;
  std::string header(const RunFolder& run, bool captured, int64_t first_step) override;
  /// The page, and of a finished run the folder model/.
  void report(const RunFolder& run, const TrainResult& result) override;
  nlohmann::json throughput(const TrainResult& result) const override;
  std::string conclusion(const RunFolder& run, const TrainResult& result) const override;

 private:
  void make_data(const std::string& own);
  void open_data(const std::string& own);
  void set_steps();

  GlueStart start_;
  MlmStart text_;
  MlmOptions options_;
  Given given_;
  MlmSettings settings_;
  int ranks_ = 1;
  bool had_evaluation_ = false;  // a run that goes on has evaluated
  uint64_t cut_at_spaces_ = 0;   // documents of a new run, see datasets::split_text
  std::optional<LanguageData> data_;
  std::optional<MlmJob> job_;
};

/// Whether the run.json is of a run of `train bert --task mlm`.
bool is_mlm_run(const nlohmann::json& run);

}  // namespace tessera::train
