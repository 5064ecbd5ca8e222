#pragma once

#include <filesystem>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "datasets/loader.h"
#include "eval/bert_batch.h"
#include "models/bert.h"
#include "optim/optimizer.h"
#include "optim/schedule.h"
#include "pretrained/load.h"
#include "tensor/precision.h"
#include "train/auto_rows.h"
#include "train/drop_settings.h"
#include "train/form_settings.h"
#include "train/glue_data.h"
#include "train/job.h"
#include "train/slice_settings.h"
#include "train/training_settings.h"

/// Fine-tuning of BERT and RoBERTa on a task of GLUE: one seed. Several: train/seeds.h.

namespace tessera::train {

/// The settings that define a run of `tessera train bert`, except device and logging. Two jobs with equal
/// fields and equal data give bitwise equal curves on one device.
struct GlueSettings : TrainingSettings {
  std::string task = "sst2";
  std::string data;   // folder of the task's files
  std::string model;  // folder with the weights to begin with; "": from random ones
  /// With the head that the task needs; its dtype is that of parameters and activations.
  models::BertConfig bert;
  std::string batches = "packed";  // packed: texts without padding; padded: each takes max_length tokens
  int64_t batch = 32;              // texts (or pairs) per micro-batch
  int64_t max_length = 128;        // tokens, special ones included; longer texts are cut
  SliceSettings slice;
  FormSettings factors;  // of the blocks' linear layers
  DropSettings drop;
  std::string trained = "all";  // parameters to train; biases: those, and the head; head: the head alone

  GlueSettings() { lr = 2e-5, schedule = "linear", steps = 0, warmup = 0; }
  /// Every setting, with its flag; those of the encoder are its config.json, one JSON object.
  SettingList list();
  Precision precision() const { return {bert.dtype, f32_math}; }
  void set_precision(Precision precision) {
    bert.dtype = precision.dtype;
    f32_math = precision.math;
  }
  int64_t texts_per_step() const { return batch * accumulate; }
  /// Throws, naming the setting.
  void validate() const;
};

/// The configuration of the encoder as its config.json has it, under "config".
nlohmann::json to_json(const GlueSettings& settings);
/// Throws, naming the key that is missing, unknown or of a wrong type.
GlueSettings glue_settings_from_json(const nlohmann::json& json);

/// Of a config.json's text, with the head that the task needs; `path` is for messages. Throws unless it is of
/// a BERT or RoBERTa.
models::BertConfig bert_config(const std::string& path, const std::string& text, datasets::GlueTask task);

/// Throws, naming both orders, if id2label of a config.json names the task's classes (in any case) in another
/// order than the task numbers them: a classifier of that file would give each class another's number.
void check_label_order(const std::string& path, const std::string& text, datasets::GlueTask task);

/// Model and optimizer on a device, and the current batch.
class GlueJob : public Job {
 public:
  /// Loads the weights of settings.model; the rest is drawn by the seed. `set`: the data of training and
  /// evaluation, which must outlive the job; without it there are no batches, and load() brings them from
  /// elsewhere. `restored`: a checkpoint is restored afterwards, so factors are not computed. Throws if the
  /// folder's model is not that of the settings.
  GlueJob(const GlueSettings& settings, Device device, const GlueSet* set = nullptr, bool restored = false);
  const GlueSettings& settings() const { return settings_; }
  models::Bert& model() { return model_; }
  /// How the names of settings.model's file were used; empty for random weights.
  const pretrained::LoadReport& loaded() const { return loaded_; }
  optim::Optimizer& optimizer() { return optimizer_; }

  JobInfo info() const override;
  bool begin(const RunFolder& run) override;
  /// Compares gradients where that is due: in a step's first micro-batch, so on its rank alone.
  void batch(uint64_t index) override;
  void divide(const dist::Share& share) override;
  /// With DropBP it first draws the branches of the step, the same for all of its micro-batches.
  Tensor loss() override;
  /// As eval::evaluate_glue, without dropout.
  Values evaluate() override;
  nlohmann::json settings_json() const override { return to_json(settings_); }

  /// Null unless the slice has rows "auto".
  const AutoRows* auto_rows() const { return auto_rows_ ? &*auto_rows_ : nullptr; }
  /// Null without DropBP.
  const nn::DropBP* drops() const { return drops_ ? &*drops_ : nullptr; }
  /// As eval::predict_glue, without dropout.
  eval::GluePredictions predict(const datasets::GlueItems& items);
  /// Brings a batch from the host to the device.
  void load(const datasets::GlueBatch& batch);

 private:
  datasets::LoaderOptions loader_options(const Rng& order, const datasets::LoaderShare& share) const;
  datasets::GlueBatch micro_batch(uint64_t index) const;
  void start_drops();
  void calibrate_drops(uint64_t step);
  void probe(uint64_t step);
  void estimate_rows(uint64_t step);
  void backward();

  GlueSettings settings_;
  Rng rng_, slice_rng_;
  pretrained::LoadReport loaded_;
  models::Bert model_;
  optim::Optimizer optimizer_;
  models::BertBatch batch_;
  Tensor targets_;
  const GlueSet* set_;
  std::optional<datasets::Loader<datasets::GlueItems>> loader_;
  uint64_t first_ = 0;  // index of this rank's first micro-batch in a step
  std::vector<pretrained::LayerParts> sliced_;
  std::optional<AutoRows> auto_rows_;
  std::optional<nn::DropBP> drops_;
  Tensor drop_rates_;                       // f64, on the CPU: of the branches, as they are drawn by
  uint64_t drop_step_ = 0;                  // the next to draw for
  std::filesystem::path probes_, row_log_;  // files of the run
};

/// The files that write_submissions makes in `folder`.
std::vector<std::string> submission_files(const GlueSet& set, const std::filesystem::path& folder);
/// Writes the predictions for the test parts in the form that the benchmark's server takes, all of them or
/// none; returns the files.
std::vector<std::string> write_submissions(GlueJob& job, const GlueSet& set,
                                           const std::filesystem::path& folder);

}  // namespace tessera::train
