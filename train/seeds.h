#pragma once

#include <functional>
#include <memory>

#include "train/run.h"
#include "train/seeds_report.h"

/// Several runs that differ in their seed alone, in one folder: `seed-<n>/` each, a table and a page of all.

namespace tessera::train {

/// The recipe of one of them.
class SeedRecipe : public Recipe {
 public:
  /// Whether a finished run lacks files that are asked for now.
  virtual bool lacks(const RunFolder& run) const = 0;
  /// Writes those files, and the page.
  virtual void complete(const RunFolder& run) = 0;
};

struct SeedGroup {
  RunFolder folder;
  uint64_t first_seed = 0;
  int64_t count = 0;
  int64_t steps = 0;  // of each run
  std::function<std::unique_ptr<SeedRecipe>(uint64_t seed)> make;
  /// After each run, also an interrupted one.
  std::function<void(Recipe&, const RunEnd&)> ended = [](Recipe&, const RunEnd&) {};

  std::filesystem::path folder_of(uint64_t seed) const {
    return folder.path() / ("seed-" + std::to_string(seed));
  }
};

struct SeedsEnd {
  int signal = 0;                    // that interrupted them; 0: all have finished
  bool in_run = false;               // it came within a run, which has its RunEnd
  SeedResults results;               // unless they were interrupted
  std::vector<TrainResult> trained;  // of the seeds that this call trained
};

/// Trains the seeds that are not done, one after the other, and completes those that are; `request`: of each,
/// but for its folder. The group has its own row in runs.sqlite next to its folder. On several ranks all
/// of them call this and train each seed together; rank 0 says which, completes and records, so the others
/// get no results and `ended` is not called there. A seed that diverges does not keep the later ones from
/// running: the results name it, and a call that resumes the group goes on with it from its newest
/// checkpoint, after which the results name it as resumed; if every seed has, the first one's Diverged is
/// thrown, on rank 0. Throws Interrupted if there is nothing yet that could go on.
SeedsEnd run_seeds(const SeedGroup& group, RunRequest request);

}  // namespace tessera::train
