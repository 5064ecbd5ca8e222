#pragma once

#include <nlohmann/json_fwd.hpp>

#include "cli/commands.h"
#include "train/tnp_job.h"

namespace tessera::cli {

/// The flags that describe a TNP and its data, shared by train, bench step, plan and eval.
class TnpFlags {
 public:
  /// Adds the flags of the sizes of model and batch; with `training` those of every setting.
  void add_to(CLI::App& command, bool training = false);
  /// The job that the flags say, but for its precision; features that are not given are those of the prior.
  /// Throws UsageError for sizes that do not fit each other.
  train::TnpSettings job() const;
  train::TnpSettings& settings() { return job_; }
  PrecisionFlag precision;

 private:
  train::TnpSettings job_;
  const CLI::App* command_ = nullptr;
};

/// The job of a run's settings. Throws, naming the file `path` that they came from.
train::TnpSettings read_job(const std::string& path, const nlohmann::json& settings);

}  // namespace tessera::cli
