#pragma once

#include <optional>

#include "cli/commands.h"
#include "train/tnp_job.h"

namespace tessera::cli {

/// The flags that describe a TNP and its data, shared by train, bench step, plan and eval.
class TnpFlags {
 public:
  /// Adds the flags of the sizes of model and batch; with `training` those of every setting.
  void add_to(CLI::App& command, bool training = false);
  /// The job that the flags say, in the precision for that device, or in f32 without one; features that are
  /// not given are those of the prior. Throws UsageError for settings that do not fit each other.
  train::TnpSettings job(std::optional<Device> device = {}) const;
  train::TnpSettings& settings() { return job_; }
  const train::TnpSettings& given_settings() const { return job_; }
  PrecisionFlag precision;

 private:
  train::TnpSettings job_;
  const CLI::App* command_ = nullptr;
};

/// How many ranks share each task, for commands without a run: bench step and plan.
struct ContextFlags {
  int64_t ranks = 1;
  std::string split = "rows";

  void add_to(CLI::App& command);
  /// Throws UsageError where so many ranks cannot share the task.
  void set(train::TnpSettings& settings) const;
};

}  // namespace tessera::cli
