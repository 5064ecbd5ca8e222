#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "sparsity/masks.h"
#include "tensor/tensor.h"

/// Features of pruned matrices: the columns of a weight [out, in] (its rows where the input is the inner
/// width of a feed-forward layer), as sets of the positions that are kept; and what is counted of them.
/// Everything here is counted in integers from packed bits (ops/bits/bits.h).

namespace tessera::sparsity {

enum class Axis : uint8_t { column, row };
const char* name_of(Axis axis);

/// The axis that features of a module lie along: rows for the second projection of a feed-forward layer
/// (down_proj, fc2, mlp.c_proj), columns for all others.
Axis axis_of(const std::string& module);

struct Features {
  Tensor bits;         // i32 [count, ceil(length / 32)], host memory
  int64_t length = 0;  // positions of a feature

  int64_t count() const { return bits.size(0); }
  double density() const;
  /// Those of the indices, in their order.
  Features select(std::span<const int64_t> indices) const;
};
Features features_of(const Mask& mask, Axis axis);

struct Summary {
  double mean = 0, sd = 0, least = 0, largest = 0;  // sd: of a sample (n - 1); 0 for one value
};
Summary summarise(std::span<const double> values);

// ---- two masks of one matrix, feature by feature ----

struct PairMetrics {
  std::vector<double> jaccard;  // |a and b| / |a or b|; 1 if both are empty
  std::vector<double> cosine;   // |a and b| / sqrt(|a| |b|); 1 if both are empty, 0 if one is
  std::vector<double> hamming;  // share of positions that differ
};
/// Throws unless both have as many features of one length.
PairMetrics compare_features(const Features& a, const Features& b);
/// Cosine of the values of each row: [n, d] and [n, d] of a floating dtype. 1 if both rows are zero, 0 if one
/// is.
std::vector<double> value_cosine(const Tensor& a, const Tensor& b);

// ---- one mask ----

struct Census {
  int64_t zero = 0, one = 0;  // features without a kept position, and without a pruned one
  int64_t duplicate = 0;      // equal to an earlier feature
  int64_t unique = 0;         // equal to no other feature
};
Census census_of(const Features& features);

/// How many features are kept at each position: the other axis's density.
std::vector<int64_t> position_counts(const Features& features);

/// Common kept positions of all pairs, i32 [count, count].
Tensor overlaps_of(const Features& features);
/// Hamming distance of two features from the overlaps.
inline int64_t hamming_from(const int32_t* overlaps, int64_t n, int64_t i, int64_t j) {
  return int64_t{overlaps[i * n + i]} + overlaps[j * n + j] - 2 * int64_t{overlaps[i * n + j]};
}

/// Block coherence: features are taken in `order`, `group` at a time (what is left over is no group); of each
/// group the share of positions at which all of them are pruned. Independent features of density p have
/// (1 - p)^group of them.
std::vector<double> coherence_of(const Features& features, std::span<const int64_t> order, int64_t group);

/// The features by their distance to `reference`, it first; ties by index.
std::vector<int64_t> nearest_order(const int32_t* overlaps, int64_t n, int64_t reference);
/// Groups without replacement: the first feature that is not yet used and its group - 1 nearest unused ones,
/// again and again. A permutation.
std::vector<int64_t> exhaustive_order(const int32_t* overlaps, int64_t n, int64_t group);

}  // namespace tessera::sparsity
