#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "sparsity/split_sweep.h"

namespace tessera::sparsity {

/// The database of a sweep: in a folder, or, without one, in memory.
class SweepStore {
 public:
  /// The one that an earlier call with these options left in the folder, or a new one; the fingerprint and
  /// the dtype are those of the loaded model. Throws if there is another database, or that of a sweep with
  /// other options.
  SweepStore(const std::string& folder, const SweepOptions& options, const std::string& fingerprint,
             DType dtype);
  report::Database& database() { return database_; }

  std::optional<SplitResult> find(const Split& split);
  void keep(const SplitResult& result, const DecodeTimes& times,
            const std::vector<std::pair<std::string, double>>& layers);
  /// The dense model as an earlier call measured it: ratios of all splits are to one measurement.
  bool find_dense(SweepResult& result);
  void keep_dense(const SweepResult& result);
  /// Distributions and greedy steps of the calibration of a split, or, unless it is gate-aware, of all splits
  /// with its weights; of the first one the histograms.
  void keep_calibration(const Calibration& calibration, const Split& split);
  /// The thresholds of a split.
  void keep(const Calibration& calibration, const Split& split, bool greedy);

 private:
  using Rows = std::vector<std::vector<report::TableCell>>;
  SweepStore(const std::string& folder, const Rows& settings, const PruneOptions& prune);
  report::Database database_;
  PruneOptions prune_;  // of the weights, whatever the split
};

/// Throws if the database is of an earlier version, whose tables do not say how the weights were pruned.
void check_sweep_tables(report::Database& database);
/// A perplexity in the database, where one that is not finite is NULL: infinity.
double kept_perplexity(const report::TableCell& cell);

}  // namespace tessera::sparsity
