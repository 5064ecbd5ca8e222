#pragma once

#include <optional>

#include "io/tokenizer/tokenizer.h"
#include "train/glue_job.h"
#include "train/seeds.h"

/// `tessera train bert`: fine-tuning on a task of GLUE, several seeds in one folder.

namespace tessera::train {

/// How a run begins: the settings that it keeps, and the flags that they follow from.
struct GlueStart {
  GlueSettings settings = {};
  std::string size = "tiny";  // of an encoder that begins from nothing: tiny, mini, small, medium, base
  bool scratch = false, pad = false, packed = false;
  int64_t seeds = 3, vocab_size = 2000, layers = 0, d_model = 0, heads = 0, d_ff = 0;  // 0: by the size
  double epochs = 3, dropout = 0;
  std::optional<Precision> precision = {};

  /// Every flag but those of GlueOptions and --precision.
  SettingList list();
  /// The configuration of an encoder trained from scratch; vocabulary and head do not fit a task yet.
  models::BertConfig scratch_config(const Given& given) const;
};

/// The files that a run writes besides its page.
struct GlueOptions {
  bool predict = false, save_model = false;
  SettingList list();
};

/// The seeds of a run: what all of them share, and their folder.
class GlueGroup {
 public:
  using Say = std::function<void(const std::string& text)>;
  /// The group that the request asks for: a new one, or that of its folder to resume. On several ranks all of
  /// them call this; rank 0 makes it, and the others read what that one has written.
  static GlueGroup open(const GlueStart& start, const GlueOptions& options, RunRequest& request);

  const GlueSettings& settings() const { return settings_; }
  const GlueSet& set() const { return *set_; }
  const GlueOptions& options() const { return options_; }
  const RunFolder& folder() const { return *folder_; }
  int64_t count() const { return count_; }
  /// Micro-batches of an epoch, by those of a step.
  double steps_per_epoch() const {
    return double(set_->train.size() / settings_.batch) / double(settings_.accumulate);
  }

  /// Removes a new folder in which no run has begun.
  void discard_folder() const;
  /// Lines that describe the training.
  std::string header() const;
  /// Prints which files a finished seed wrote.
  Say say = [](const std::string&) {};
  /// The seeds as run_seeds takes them.
  SeedGroup seeds() const;
  /// Writes the page and summary.json of all seeds; the summary also to `file`, unless that is "", with the
  /// times of the seeds that were trained now. Returns the page's path.
  std::filesystem::path write_results(const SeedsEnd& end, Device device, const std::string& file) const;
  /// Writes a trained encoder as a Hugging Face model directory, with the tokenizer that goes with it.
  void save_model(const models::Bert& model, const std::filesystem::path& folder) const;

 private:
  explicit GlueGroup(const GlueOptions& options) : options_(options) {}
  void begin(const GlueStart& start, RunRequest& request);
  void settle(const GlueStart& start, const RunRequest& request);
  void resume(const GlueStart& start, RunRequest& request);
  void follow(RunRequest& request);
  void announce(const RunRequest& request) const;
  nlohmann::json take_settings(TrainerOptions& options, const Given& given);
  void create_folder(const RunRequest& request);
  void read_set();
  void read_known_set(const nlohmann::json& run);
  void write_settings(const TrainerOptions& options, nlohmann::json run);

  GlueSettings settings_;  // of the first seed
  GlueOptions options_;
  int64_t count_ = 0;
  bool is_new_ = false;
  std::optional<RunFolder> folder_;
  std::optional<FolderLock> lock_;
  std::optional<io::Tokenizer> tokenizer_;
  std::string tokenizer_text_;  // of a tokenizer made for the run
  std::optional<GlueSet> set_;
};

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
  void set_ranks(int ranks, const Given& given, bool) override { settings_.set_ranks(ranks, given, true); }
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
  std::optional<GlueJob> job_;
};

}  // namespace tessera::train
