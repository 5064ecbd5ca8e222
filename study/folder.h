#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>

#include "study/plan.h"
#include "train/run_folder.h"

/// The folder of a study:
///   study.json       the plan, and what became of each cell
///   cells/<cell>/    run folders, with their runs.sqlite
///   timing/          runs of a few steps for step times, where no cell of an arm ran alone
///   logs/<cell>.log  what each cell printed
///   and what study/report.h writes

namespace tessera::study {

enum class CellStatus { pending, begun, interrupted, finished, failed };
const char* name_of(CellStatus status);

/// The state of a cell.
struct CellRecord {
  CellStatus status = CellStatus::pending;
  std::string reason;  // of a failed one, one line
  int64_t attempts = 0;
  bool alone = true;  // no other cell ran at the same time: its step times are worth something
  Flags flags;        // it ran with these
};

/// The folder of a study and its study.json.
class Folder {
 public:
  /// A new folder, or the one that an earlier call of the same study left; held for this process while the
  /// object lives. Throws if it is something else or held by another process, if a cell that has begun there
  /// is not in the plan or ran with other flags, or if one still runs for a call that was killed.
  static Folder begin(const std::filesystem::path& path, const Plan& plan);
  /// One that is there.
  static Folder open(const std::filesystem::path& path);

  const std::filesystem::path& path() const { return path_; }
  const Plan& plan() const { return plan_; }
  std::filesystem::path cells() const { return path_ / "cells"; }
  std::filesystem::path timing() const { return path_ / "timing"; }
  std::filesystem::path log_of(const Cell& cell) const { return path_ / "logs" / (cell.name + ".log"); }
  CellRecord record_of(const Cell& cell) const;
  /// Writes study.json.
  void set(const Cell& cell, const CellRecord& record);

  /// The folder with the cell's metrics.jsonl, if it has begun: its run folder, or the one of its seed in it.
  static std::optional<train::RunFolder> run_of(const std::filesystem::path& runs, const Cell& cell);

 private:
  Folder(std::filesystem::path path, Plan plan) : path_(std::move(path)), plan_(std::move(plan)) {}
  void read();
  void check_cells() const;
  void check_ended() const;
  void write() const;

  std::filesystem::path path_;
  Plan plan_;
  std::map<std::string, CellRecord> records_;
  std::optional<train::FolderLock> lock_;
};

/// Whether the run in the folder has nothing left to do: its page is there, and its last step is saved or it
/// has ended early (--patience).
bool is_complete(const std::filesystem::path& run);

}  // namespace tessera::study
