#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "datasets/loader.h"
#include "eval/glue.h"
#include "models/bert.h"
#include "optim/optimizer.h"
#include "pretrained/load.h"
#include "train/auto_rows.h"
#include "train/glue_data.h"
#include "train/glue_settings.h"
#include "train/job.h"

/// Fine-tuning of BERT and RoBERTa on a task of GLUE: one seed. Several: train/seeds.h.

namespace tessera::train {

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
  datasets::Loader<datasets::GlueItems> loader_of(const dist::Share& share,
                                                  datasets::LoaderOptions how) const;
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

}  // namespace tessera::train
