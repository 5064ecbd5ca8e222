#pragma once

#include <optional>

#include "train/run.h"
#include "train/tnp_job.h"

namespace tessera::train {

/// `tessera train tnp`. begin(), which the command adds, says the settings of a new run.
class TnpRecipe : public Recipe {
 public:
  int64_t eval_tasks = 512;     // fresh tasks per evaluation
  bool find_max_batch = false;  // take the largest batch that fits
  /// Ranks that compute each task together, and how they divide it (TnpSettings::split).
  int64_t context_parallel = 1;
  std::string context_split = "rows";

  const char* name() const override { return "tnp"; }
  SettingList options() override;
  void resume(const std::string& path, const nlohmann::json& run, const Given& given) override;
  std::string default_name() const override { return "tnp-" + settings_.prior; }
  void set_ranks(int ranks, const Given& given, bool resumed) override;
  void spread(const optim::Sharding& sharding) override { settings_.sharding = sharding; }
  void decide(TrainerOptions& options) const override;
  void prepare(const RunFolder& run, Device device, bool resumed) override;
  Job& job() override { return *job_; }
  const TrainingSettings& training() const override { return settings_; }
  DType dtype() const override { return settings_.model.dtype; }
  nlohmann::json facts() const override { return {{"evaluation", {{"tasks", eval_tasks}}}}; }
  std::string header(const RunFolder& run, bool captured, int64_t first_step) override;
  void report(const RunFolder& run, const TrainResult& result) override;
  nlohmann::json throughput(const TrainResult& result) const override;
  std::string conclusion(const RunFolder& run, const TrainResult& result) const override;

 protected:
  /// Throws for flags that have no effect without another.
  void check_given(const Given& given) const;
  /// Settings that a resumed run may take again.
  virtual const TnpSettings& given_settings() const = 0;
  TnpSettings settings_;

 private:
  /// Points of the largest share.
  int64_t share_of_points(int64_t points) const;
  int ranks_ = 1;
  std::optional<TnpJob> job_;
};

}  // namespace tessera::train
