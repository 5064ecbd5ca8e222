#pragma once

#include <optional>
#include <vector>

#include "datasets/prior.h"
#include "eval/tnp.h"
#include "models/tnp.h"
#include "optim/optimizer.h"
#include "train/job.h"
#include "train/tnp_settings.h"

/// A Transformer Neural Process trained on a synthetic prior.

namespace tessera::train {

/// Model, optimizer, and the fixed tensors of one batch on a device. With several ranks per task
/// (TnpSettings::split) each of them draws the whole batch, and computes its share of the rows.
class TnpJob : public Job {
 public:
  /// `eval_tasks`: fresh tasks of an evaluation.
  TnpJob(const TnpSettings& settings, Device device, int64_t eval_tasks = 512);
  const TnpSettings& settings() const { return settings_; }
  models::Tnp& model() { return model_; }
  optim::Optimizer& optimizer() { return optimizer_; }

  JobInfo info() const override;
  /// Throws if this build draws other tasks than the run's (check_task_stream).
  bool begin(const RunFolder& run) override;
  /// The first batch is compared with those of the ranks that compute it together: throws if they differ.
  void batch(uint64_t index) override;
  void connect(const dist::World& world) override;
  Tensor loss() override {
    const F32MathScope math(settings_.f32_math);
    return model_.loss(own_);
  }
  /// eval_nll, eval_optimal_nll, eval_gap and eval_gap_error: the fields of eval::TnpEvaluation.
  Values evaluate() override;
  nlohmann::json settings_json() const override { return to_json(settings_); }

  /// Copies a batch from the host into the tensors that loss() reads.
  void load(const datasets::RegressionBatch& batch);
  /// Draws batch `index` of a prior on the job's device into them, in stream order.
  void draw(const datasets::Prior& prior, uint64_t index);
  /// The tensors that load() fills: xc, yc, xt, yt.
  std::vector<Tensor> inputs() const { return {batch_.xc, batch_.yc, batch_.xt, batch_.yt}; }
  const models::TnpBatch& inputs_of_loss() const { return batch_; }

 private:
  TnpSettings settings_;
  Rng rng_;
  models::Tnp model_;
  optim::Optimizer optimizer_;
  datasets::Prior prior_;
  models::TnpBatch batch_;               // whole
  models::TnpBatch own_;                 // what this rank computes of it: views
  std::optional<eval::TnpGroup> group_;  // with several ranks per task, once they are connected
  bool compared_ = false;
  int64_t eval_tasks_;
};

}  // namespace tessera::train
