#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "train/run_folder.h"

/// A study: arms x tasks x learning rates x seeds over a `tessera train` command. Each cell is an ordinary
/// run folder. The folder of a study:
///   study.json       the plan, and what became of each cell
///   cells/<cell>/    run folders, with their runs.sqlite
///   timing/          runs of a few steps for step times, where no cell of an arm ran alone
///   logs/<cell>.log  what each cell printed
///   and what study_report.h writes

namespace tessera::train {

/// Flags of `tessera train` with their values, as the command line takes them: {"--text", {"a", "b"}}. A
/// switch has no value.
using StudyFlags = std::map<std::string, std::vector<std::string>>;

/// An arm or a task: a name, and the flags that make it differ.
struct StudyPart {
  std::string name;
  StudyFlags flags;
};

struct StudyPlan {
  std::string title;
  std::string command;   // of `tessera train`: "bert"
  std::string metric;    // of the evaluation: "eval_score"
  bool higher = true;    // whether a higher metric is the better one
  std::string baseline;  // the arm that the others are compared with
  StudyFlags flags;      // of every cell; those of a task win over them, those of an arm over both
  std::vector<StudyPart> arms;
  std::vector<StudyPart> tasks;    // empty: one that has no name
  std::vector<std::string> rates;  // learning rates, as they were written; empty: that of the flags
  std::vector<uint64_t> seeds;
  bool one_seed_per_run = false;  // the command takes --seeds, which is then 1

  /// Throws, saying what is wrong and what to do: no arms or seeds, names that are no part of a file's name
  /// or are given twice, a baseline that no arm is called, a learning rate that is not a positive number or
  /// given in two ways, a flag that the study sets itself.
  void validate() const;
};

nlohmann::json to_json(const StudyPlan& plan);
/// Throws, naming `file`, if it is no plan.
StudyPlan study_plan_from_json(const nlohmann::json& json, const std::string& file);

/// One run of a study.
struct StudyCell {
  std::string name;  // of its folder: "dense,sst2,lr-3e-4,seed-1", without the parts that the study lacks
  std::string arm, task, rate;
  uint64_t seed = 0;
  StudyFlags flags;  // all but those that say where it goes
};
/// Seed by seed, and the arms of a seed one after the other: what is compared runs close in time.
std::vector<StudyCell> cells_of(const StudyPlan& plan);
/// A run of `steps` steps of the arm on the task, for its step time: the first cell of them without
/// evaluations and saved checkpoints along the way, and without what counts the steps of the whole run, such
/// as --dense-first.
StudyCell timing_cell(const StudyPlan& plan, const std::string& arm, const std::string& task, int64_t steps);
/// The arguments of `tessera` that begin a cell's run in `runs`, or continue the one there.
std::vector<std::string> arguments_of(const StudyPlan& plan, const StudyCell& cell,
                                      const std::filesystem::path& runs, bool resumed);

enum class CellStatus { pending, begun, interrupted, finished, failed };
const char* name_of(CellStatus status);

/// The state of a cell.
struct CellRecord {
  CellStatus status = CellStatus::pending;
  std::string reason;  // of a failed one, one line
  int64_t attempts = 0;
  bool alone = true;  // no other cell ran at the same time: its step times are worth something
  StudyFlags flags;   // it ran with these
};

/// The folder of a study and its study.json.
class StudyFolder {
 public:
  /// A new folder, or the one that an earlier call of the same study left; held for this process while the
  /// object lives. Throws if it is something else or held by another process, if a cell that has begun there
  /// is not in the plan or ran with other flags, or if one still runs for a call that was killed.
  static StudyFolder begin(const std::filesystem::path& path, const StudyPlan& plan);
  /// One that is there.
  static StudyFolder open(const std::filesystem::path& path);

  const std::filesystem::path& path() const { return path_; }
  const StudyPlan& plan() const { return plan_; }
  std::filesystem::path cells() const { return path_ / "cells"; }
  std::filesystem::path timing() const { return path_ / "timing"; }
  std::filesystem::path log_of(const StudyCell& cell) const { return path_ / "logs" / (cell.name + ".log"); }
  CellRecord record_of(const StudyCell& cell) const;
  /// Writes study.json.
  void set(const StudyCell& cell, const CellRecord& record);

  /// The folder with the cell's metrics.jsonl, if it has begun: its run folder, or the one of its seed in it.
  static std::optional<RunFolder> run_of(const std::filesystem::path& runs, const StudyCell& cell);

 private:
  StudyFolder(std::filesystem::path path, StudyPlan plan) : path_(std::move(path)), plan_(std::move(plan)) {}
  void read();
  void check_cells() const;
  void check_ended() const;
  void write() const;

  std::filesystem::path path_;
  StudyPlan plan_;
  std::map<std::string, CellRecord> records_;
  std::optional<FolderLock> lock_;
};

/// Whether the run in the folder has nothing left to do: its page is there, and its last step is saved or it
/// has ended early (--patience).
bool is_complete(const std::filesystem::path& run);

}  // namespace tessera::train
