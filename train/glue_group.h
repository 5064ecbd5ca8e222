#pragma once

#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "io/tokenizer/tokenizer.h"
#include "train/glue_data.h"
#include "train/glue_start.h"
#include "train/seeds.h"

/// `tessera train bert`: fine-tuning on a task of GLUE, several seeds in one folder.

namespace tessera::train {

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

/// The settings of a job, and its encoder, as the pages of runs list them.
std::vector<std::pair<std::string, std::string>> report_rows(const GlueSettings& job);

}  // namespace tessera::train
