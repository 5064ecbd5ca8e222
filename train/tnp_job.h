#pragma once

#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "datasets/prior.h"
#include "eval/tnp.h"
#include "io/checkpoint.h"
#include "models/tnp.h"
#include "optim/optimizer.h"
#include "optim/schedule.h"
#include "tensor/precision.h"
#include "train/trainer.h"
#include "train/training_settings.h"

/// A Transformer Neural Process trained on a synthetic prior.

namespace tessera::train {

/// The settings that define a run of `tessera train tnp`, except device and logging. Two jobs with equal
/// fields and steps give bitwise equal curves on one device.
struct TnpSettings : TrainingSettings {
  models::TnpConfig model;
  std::string prior = "linear";  // linear, rbf, matern52, periodic
  int64_t context = 64;          // M
  int64_t targets = 64;          // N
  int64_t batch = 16;            // tasks per micro-batch
  /// How several ranks share each task. Depends on where the run executes, not on the job; the bits depend on
  /// it.
  models::TaskSplit split = {};
  /// datasets::kTaskStream of the build that made the run; settings without it are of a run of version 1.
  int64_t task_stream = datasets::kTaskStream;

  /// Every setting, with its flag.
  SettingList list();
  /// Adds the sizes of model and batch alone, which benchmarks and plans have too.
  void add_sizes(SettingList& list);
  Precision precision() const { return {model.dtype, f32_math}; }
  void set_precision(Precision precision) {
    model.dtype = precision.dtype;
    f32_math = precision.math;
  }
  /// Throws, naming the setting.
  void validate() const;
  /// Memory of a step of one rank, on one micro-batch, with the states of the optimizer.
  plan::Memory planned(Device device) const;
  /// Throws, naming the setting, if so many ranks cannot share a task.
  void check_split() const;
};

nlohmann::json to_json(const TnpSettings& settings);
/// Throws, naming the key that is missing, unknown or of a wrong type.
TnpSettings tnp_settings_from_json(const nlohmann::json& json);
/// The settings in the run.json `run` at `path`. Throws, naming the file.
TnpSettings tnp_settings_of_run(const std::string& path, const nlohmann::json& run);

/// Where the job's tasks come from, drawn on `device`; those of an evaluation are never met in training.
datasets::Prior make_prior(const TnpSettings& settings, Device device = Device::cpu());
/// Tasks that training never meets, `batch` at a time.
datasets::Prior fresh_tasks(const TnpSettings& settings, int64_t batch, Device device = Device::cpu());
/// The default number of features of tasks: 10 for the linear prior, 1 for the others, which have no more.
int64_t default_features(const std::string& prior);
/// Throws if training cannot go on as it began because this build draws other tasks than the run's. Such a
/// run can still be evaluated and shown.
void check_task_stream(const TnpSettings& settings);

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

/// The largest batch whose training step fits on the device: doubles until a step runs out of memory, then
/// bisects.
int64_t find_max_batch(const TnpSettings& settings, Device device, int64_t most = int64_t(1) << 20);

}  // namespace tessera::train
