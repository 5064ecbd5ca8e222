#pragma once

#include <optional>
#include <string>
#include <vector>

#include "eval/statistics.h"
#include "study/basis.h"
#include "study/folder.h"

/// The results of the cells of a study.

namespace tessera::study {

/// One cell. The score is the study's metric at the last evaluation, not at the best one: to pick the best of
/// many on the development part is optimistic.
struct CellResult {
  Cell cell;
  CellRecord record;
  std::vector<train::StepRecord> records;  // metrics.jsonl
  double score, loss;                      // NaN: none
  int64_t steps = 0;
  std::string gpu, revision;
  Basis basis;          // of the score
  bool counts() const;  // finished, with a finite score
};

/// The step time of an arm on a task, measured while nothing else of the study ran.
struct StepTime {
  std::string arm, task;
  double ms = 0;  // median over the logged intervals after a run's second step; NaN: not measured
  int64_t intervals = 0;
  bool own_run = false;  // of a run for step times; else of cells
};

/// An arm next to the baseline, on one task at one learning rate.
struct Comparison {
  std::string task;         // "": the only one
  bool over_tasks = false;  // each seed's score is its mean over all tasks
  std::string rate;         // "": that of the flags
  bool best_rate = false;   // of each arm its rate with the best mean score; `rate` says which
  std::string arm;
  bool is_baseline = false;
  std::vector<uint64_t> seeds;  // that count
  eval::Interval score;         // over the seeds
  /// Arm - baseline over the seeds that both have, and its p-value after Holm's correction over the arms.
  std::optional<eval::Interval> difference;
  double p_holm;
  /// The score that is 5 % of its size short of the baseline's mean, the seeds with an evaluation at least as
  /// good, and the step of the first one over these. Not over tasks.
  double target;
  int64_t reached = 0;
  std::optional<eval::Interval> steps_to_target;

  /// The facts in which the basis of a score differs from those of the baseline (study/basis.h): then there
  /// is no difference, and no target. "": none.
  std::string incomparable;

  /// "baseline", "better", "worse", "not told apart", "not compared" or, without an interval, "-".
  std::string verdict(bool higher) const;
};

struct Results {
  Plan plan;
  std::vector<CellResult> cells;
  std::vector<StepTime> times;
  /// In families that are corrected together: task by task at each rate, then (of several rates) at the best
  /// rates, then over all tasks.
  std::vector<std::vector<Comparison>> families;

  int64_t count(CellStatus status) const;
  const StepTime& time_of(const std::string& arm, const std::string& task) const;
  /// The cells of an arm that count.
  std::vector<const CellResult*> cells_of_arm(const Comparison& comparison) const;
};

Results collect(const Folder& folder);

}  // namespace tessera::study
