#pragma once

#include <functional>
#include <optional>

#include "train/language_job.h"
#include "train/run.h"

namespace tessera::train {

/// `tessera train gpt` and `tessera train llama`. begin(), which the command adds, defines the settings and
/// the data of a new run.
class LanguageRecipe : public Recipe {
 public:
  explicit LanguageRecipe(bool llama) : llama_(llama) {}
  LanguageWatch watch;
  int64_t eval_every = 0;  // as the command says it for the trainer; what is asked for must be there
  /// Tells how many bytes of the text were not UTF-8.
  std::function<void(uint64_t invalid, uint64_t bytes)> on_invalid = [](uint64_t, uint64_t) {};

  const char* name() const override { return llama_ ? "llama" : "gpt"; }
  SettingList options() override { return watch.list(); }
  void resume(const std::string& path, const nlohmann::json& run, const Given& given) override;
  std::string default_name() const override { return name(); }
  void set_ranks(int ranks, const Given& given, bool resumed) override;
  void spread(const optim::Sharding& sharding) override {
    settings_.check_averages(sharding.gradients ? 2 : 1);
    settings_.sharding = sharding;
  }
  void prepare(const RunFolder& run, Device device, bool resumed) override;
  Job& job() override { return *job_; }
  const TrainingSettings& training() const override { return settings_; }
  DType dtype() const override { return settings_.dtype(); }
  void decide(TrainerOptions& options) const override { options.sample_every = watch.sample_every; }
  nlohmann::json facts() const override;
  std::string header(const RunFolder& run, bool captured, int64_t first_step) override;
  void report(const RunFolder& run, const TrainResult& result) override;
  nlohmann::json throughput(const TrainResult& result) const override;
  std::string conclusion(const RunFolder& run, const TrainResult& result) const override;

 protected:
  /// Settings that a resumed run may take again.
  virtual const LanguageSettings& given_settings() const = 0;
  /// Notes the first given flag that has no effect without held-out text, for prepare(), which knows whether
  /// there is any.
  void note_evaluation(const Given& given);
  bool is_llama() const { return llama_; }

  LanguageSettings settings_;
  LanguageText text;               // of a new run without shards
  double epochs = 0, minutes = 0;  // of a new run, the shorter one; 0 and 0: settings_.steps

 private:
  void check_not_over(const RunFolder& run) const;
  void make_data(const std::string& own);
  void open_data(const std::string& own);
  void check_export(const RunFolder& run) const;
  void check_held_out(const RunFolder& run);
  void set_steps(Device device);
  std::map<std::string, Tensor> first_gradients(Device device);
  std::string data_lines(int64_t first_step) const;
  std::string evaluation_lines() const;
  double read_epochs() const;  // how often the run reads the text

  bool llama_;
  std::string wants_evaluation_;
  int ranks_ = 1;
  bool had_evaluation_ = false;  // a run that goes on has evaluated
  std::optional<LanguageData> data_;
  std::optional<LanguageJob> job_;
  HeldOut held_out_;
  std::string held_out_text_;   // fingerprint of the text of its targets
  uint64_t cut_at_spaces_ = 0;  // documents of a new run, see datasets::split_text
  BestEvaluation best_;
  NgramBaseline baseline_;
};

}  // namespace tessera::train
