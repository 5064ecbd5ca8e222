#pragma once

#include <filesystem>
#include <map>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

/// The record of one run on disk:
///   run.json        every setting, versions, seed, revision, GPU
///   metrics.jsonl   one line per logged step
///   samples.jsonl   texts sampled from a language model during training, if requested
///   events.*        the same for TensorBoard, if built with protobuf; a resumed run adds a file
///   checkpoints/    the newest ones
///   report.html     self-contained page
/// and one row in runs.sqlite next to the run folders. Names that are not UTF-8 are written to all of them as
/// io::utf8_text has them.

namespace tessera::train {

/// One line of metrics.jsonl: the step and named values ("loss", "lr", "tokens_per_s", "eval_nll", ...). A
/// value that is not finite is written as null in JSON and kept as NaN here.
struct StepRecord {
  int64_t step = 0;
  std::map<std::string, double> values;
};

/// One line of samples.jsonl.
struct Sample {
  int64_t step = 0;
  std::string text;  // UTF-8
};

/// Holds a folder for this process to write in. The lock is the system's: it ends with the process, however
/// that ends. A file system without locks grants it to every process.
class FolderLock {
 public:
  /// Throws, naming the folder, if another process holds it.
  explicit FolderLock(const std::filesystem::path& folder);
  ~FolderLock();
  FolderLock(FolderLock&& other) noexcept : file_(std::exchange(other.file_, -1)) {}
  FolderLock& operator=(FolderLock&&) = delete;

 private:
  int file_ = -1;
};

class RunFolder {
 public:
  /// A new folder root/name, or root/name-2, ... if that exists. Throws if it cannot be made, or if `name` is
  /// not a plain file name.
  static RunFolder create(const std::filesystem::path& root, const std::string& name);
  /// An existing one, to go on with it. Throws unless it holds a run.json.
  static RunFolder open(const std::filesystem::path& path);

  const std::filesystem::path& path() const { return path_; }
  std::filesystem::path checkpoints() const { return path_ / "checkpoints"; }
  /// Whether there is one to go on from.
  bool has_checkpoints() const;

  /// Held by the process that trains: two at once would mix their lines and delete each other's checkpoints.
  /// What killed writers left in the folder is removed.
  FolderLock lock() const;

  void write_settings(const nlohmann::json& settings) const;
  /// Throws, naming the file, unless it holds a JSON object.
  nlohmann::json settings() const;
  /// The settings of a run of `train <model>`; throws if they say that it is one of another model.
  nlohmann::json settings_of(const std::string& model) const;

  /// Appends a line; it has reached the operating system when this returns.
  void append(const StepRecord& record) const;
  /// Rewrites the line of that step with what is known by now, all or nothing, and removes lines of later
  /// steps.
  void replace_last(const StepRecord& record) const;
  /// All whole lines; a line torn by a killed process is left out.
  std::vector<StepRecord> metrics() const;
  void append(const Sample& sample) const;
  std::vector<Sample> samples() const;
  /// Removes what was logged after `step`: a resumed run logs those steps again. Also removes lines logged
  /// only because the run was stopped there ("interrupted"), so that the curve does not depend on it.
  void truncate_metrics(int64_t step) const;

 private:
  explicit RunFolder(std::filesystem::path path) : path_(std::move(path)) {}
  std::filesystem::path path_;
};

/// What the row of a run says where its folder has no metrics.jsonl (that of several seeds).
struct RunFigures {
  std::optional<int64_t> steps;
  std::optional<double> loss, best_evaluation;
};

/// Writes or updates the run's row in `database` (report::RunRow) from run.json and metrics.jsonl; the best
/// evaluation is the lowest eval_nll, or the highest eval_score. Without SQLite in the build it does nothing;
/// `doctor` says so.
void record_run(const std::filesystem::path& database, const RunFolder& run, const std::string& status,
                const RunFigures& figures = {});

}  // namespace tessera::train
