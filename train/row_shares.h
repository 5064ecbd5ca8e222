#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

/// How many rows a sliced layer needs: the arithmetic of `--rows auto` (train/auto_rows.h), without a model.

namespace tessera::train {

/// The rows that a group of layers chooses from in the backward pass of one batch. A group is what chooses
/// its rows once: a feed-forward network, or a layer by itself.
struct RowNorms {
  /// |dy_i|, by which `importance` chooses: of the gradient that arrives at the group's last layer.
  std::vector<double> norms;
  /// The contribution of row i to the squared norm of the weights' gradients: the sum over the group's layers
  /// of |dy_i|^2 |x_i|^2.
  std::vector<double> squares;
};

/// Variance of the group's own weight gradients if `importance` chooses k of the rows, with p_i = min(1, c
/// norm_i), sum p_i = k (ops::Selection::importance):
///   sum_i (1 / p_i - 1) squares_i
/// That of independent draws: systematic sampling draws dependently, and what the chosen rows do to the
/// layers below is not in it. k >= 1; 0 if k rows are all that have a positive norm.
double sampling_variance(const RowNorms& rows, int64_t k);

/// One share of one group: its variance, and the seconds of its backward pass.
struct ShareOption {
  double share = 1, variance = 0, seconds = 0;
};

/// Which option each group takes so that the variances sum to at most `bound` and the seconds to as little as
/// possible; per group an index. The first option of each group has no variance (all rows). Greedy along the
/// lower convex hull of each group's (variance, seconds), the step that saves most seconds per variance
/// first: optimal but for the last step of each group, as in knapsack problems whose items may be cut.
/// Options that save no time over all rows are never taken.
std::vector<size_t> choose_options(const std::vector<std::vector<ShareOption>>& groups, double bound);

/// The shares that are considered, falling from 1 in steps of a fourth root of 2 to 1 / 64: neighbours differ
/// by 16 % of the rows, less than the estimates of the variance are off.
std::vector<double> share_steps();

/// Modelled seconds of a group's backward pass of `rows` rows with `flops` multiply-adds times two, if
/// `share` of the rows are multiplied and dy has `columns` columns; 1: all rows, without a choice. On a GPU
/// the constants are fits to the backward passes of BERT-base's feed-forward network on an H200
/// (docs/sparse_backward.md, cost on a GPU); on the CPU they say what the choice and the copies cost next to
/// the GEMMs. A model and not a measurement, so that runs with the same seed choose the same rows.
double backward_seconds(double rows, double flops, double columns, double share, bool gpu);

}  // namespace tessera::train
