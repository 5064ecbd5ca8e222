#pragma once

#include <string>

#include "datasets/prior.h"
#include "models/tnp.h"
#include "tensor/precision.h"
#include "train/training_settings.h"

/// What a run of `tessera train tnp` is made by.

namespace tessera::train {

/// The settings that define a run of `tessera train tnp`, except device and logging. Two jobs with equal
/// fields and steps give bitwise equal curves on one device.
struct TnpSettings : TrainingSettings {
  static constexpr const char* kJob = "tnp job";

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

/// Where the job's tasks come from, drawn on `device`; those of an evaluation are never met in training.
datasets::Prior make_prior(const TnpSettings& settings, Device device = Device::cpu());
/// Tasks that training never meets, `batch` at a time.
datasets::Prior fresh_tasks(const TnpSettings& settings, int64_t batch, Device device = Device::cpu());
/// The default number of features of tasks: 10 for the linear prior, 1 for the others, which have no more.
int64_t default_features(const std::string& prior);
/// Throws if training cannot go on as it began because this build draws other tasks than the run's. Such a
/// run can still be evaluated and shown.
void check_task_stream(const TnpSettings& settings);

}  // namespace tessera::train
