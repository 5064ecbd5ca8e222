#pragma once

#include <optional>
#include <string>

#include "train/glue_group.h"
#include "train/glue_job.h"

namespace tessera::train {

/// One seed of a group, which must outlive it.
class GlueRecipe : public SeedRecipe {
 public:
  GlueRecipe(const GlueGroup& group, uint64_t seed);
  const char* name() const override { return "bert"; }
  SettingList options() override { return options_.list(); }
  void begin(const Given&, Device) override {}  // the group has the settings
  void resume(const std::string&, const nlohmann::json&, const Given&) override {}
  std::string default_name() const override { return "bert"; }
  /// The group has settled them, also for a seed that begins where others are done.
  void set_ranks(int ranks, const Given& given, bool) override {
    settings_.set_ranks(ranks, given, true);
    ranks_ = ranks;
  }
  void spread(const optim::Sharding& sharding) override;
  void prepare(const RunFolder& run, Device device, bool resumed) override;
  Job& job() override { return *job_; }
  const TrainingSettings& training() const override { return settings_; }
  DType dtype() const override { return settings_.bert.dtype; }
  std::string header(const RunFolder& run, bool captured, int64_t first_step) override;
  void report(const RunFolder& run, const TrainResult& result) override;
  nlohmann::json throughput(const TrainResult& result) const override;
  std::string conclusion(const RunFolder& run, const TrainResult& result) const override;
  bool lacks(const RunFolder& run) const override;
  void complete(const RunFolder& run) override;

 private:
  std::string origin() const;
  void write_extras(const RunFolder& run);
  void write_page(const RunFolder& run) const;

  const GlueGroup& group_;
  GlueSettings settings_;
  GlueOptions options_;
  int ranks_ = 1;
  std::optional<GlueJob> job_;
};

}  // namespace tessera::train
