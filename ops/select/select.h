#pragma once

#include <string>

#include "runtime/rng.h"
#include "tensor/tensor.h"

namespace tessera::ops {

/// How rows are chosen: the functions of Selection.
enum class SelectMode : uint8_t { first, top_norm, threshold, random, importance };
const char* name_of(SelectMode mode);
/// Throws, naming the modes, if there is none of that name.
SelectMode parse_select_mode(const std::string& name);

/// That share of `rows`, rounded down, but at least one of them. Exact in integers, so that the host and
/// every GPU come to the same number. 0 < share <= 1.
int64_t share_of_rows(int64_t rows, double share);

/// Numbers that a captured graph reads from the device at each replay, instead of the host's.
struct SelectionCounts {
  Tensor n = {};     // i32 [1]: how many rows to choose, at most the n that the host gives
  Tensor rows = {};  // i32 [1]: only the first so many rows may be chosen (the others are padding rows)
  double share = 1;  // at most share_of_rows(rows that may be chosen, share); 0 < share <= 1
};

/// Some of M rows, on the device: which ones and with which factor each enters a sum over all rows. The host
/// knows how many there are at most (`capacity`), the device how many there are (`count`). Every way of
/// choosing is safe in a captured graph and never makes the host wait.
///
/// Rows are compared by their norms as f32 (a norm of another dtype is rounded to that first): -0 is 0, and a
/// NaN is larger than +inf, so that the ways that look at norms choose rows that hold one first, and it stays
/// visible in what is computed from the rows. Given the same norms and random stream the CPU and every GPU
/// choose the same rows with the same factors, to the bit: all sums are of integers.
///
/// With k = min(n, rows that may be chosen, their share), each way but `threshold` chooses exactly k rows; n
/// must not exceed M (SelectionCounts clamps: the host cannot read its numbers).
struct Selection {
  Tensor indices;    // i32 [capacity], ascending; `rows` from entry `count` on
  Tensor scales;     // f32 [capacity]; 0 from entry `count` on
  Tensor count;      // i32 [1]
  int64_t rows = 0;  // M

  int64_t capacity() const { return indices.count(); }

  /// Rows 0 ... k - 1, each with scale 1.
  static Selection first(int64_t rows, int64_t n, Device device, const SelectionCounts& counts = {},
                         Site site = Site::here());
  /// The k rows of largest norm, scale 1. Of equal norms the lowest indices are taken. norms: floating [M].
  static Selection top_norm(const Tensor& norms, int64_t n, const SelectionCounts& counts = {},
                            Site site = Site::here());
  /// The rows with norm >= threshold and those with a NaN, scale 1; capacity M. Throws if `threshold` is NaN
  /// or counts.n is given.
  static Selection threshold(const Tensor& norms, double threshold, const SelectionCounts& counts = {},
                             Site site = Site::here());
  /// k rows, all sets of k equally likely, scale M / k. Row i has word i % 4 of philox(seed, offset, i / 4)
  /// as its key, and the k largest keys are taken, of equal ones the lowest index; a tie at the last key
  /// makes the probability of a row differ from k / M by at most 2^-32.
  static Selection random(int64_t rows, int64_t n, const Rng& rng, Device device,
                          const SelectionCounts& counts = {}, Site site = Site::here());
  /// k rows; row i is one of them with probability p_i = min(1, c norm_i), where sum p_i = k, and its scale
  /// is 1 / p_i: the sum of the chosen rows times their scales estimates the sum of all rows without bias. Of
  /// all p_i with that sum these have the least sum of norm_i^2 / p_i (Katharopoulos, Fleuret,
  /// arXiv:1803.00942, section 3.2). Systematic sampling (Madow, Madow, Annals of Mathematical Statistics 15,
  /// 1944): one random number u in [0, 1) serves all rows; they lie side by side in index order, each as long
  /// as its p_i, and those at u, u + 1, ..., u + k - 1 are taken.
  ///
  /// Norms count as integers: norm_i times 2^(31 - e), rounded down, where 2^e is the largest power of two
  /// not above the largest finite norm; a positive norm below one unit counts as one unit. p_i is
  /// proportional to that integer as far as the 53 bits of u tell rows apart, and `scales` holds 1 / p_i of
  /// it within some roundings of f32, so what rounding down does is no bias. NaN and infinite norms have p_i
  /// = 1 (of more than k the lowest indices are taken), zero and negative ones p_i = 0, unless fewer than k
  /// norms are positive, infinite or NaN: then all of those are taken, and the rest of k is drawn from the
  /// other rows, equally likely.
  static Selection importance(const Tensor& norms, int64_t n, const Rng& rng,
                              const SelectionCounts& counts = {}, Site site = Site::here());
};

/// L2 norms of the rows of x (all dimensions but the first) in f32: x [M, ...], floating -> [M]. f64 for f64.
/// Accumulated in f64, rounded once. A statistic: no gradient flows through it.
Tensor row_norms(const Tensor& x, Site site = Site::here());

/// Whether rows are multiplied by their scale.
enum class RowScale : uint8_t { none, selection };

/// y[n] = x[indices[n]], times scales[n] if asked for: x [M, ...] -> [capacity, ...]. Rows from the count on
/// are 0. Floating dtypes; the scales are f32 in all of them, the product is rounded once. dx =
/// scatter_selected(dy, selection, scale).
Tensor gather_selected(const Tensor& x, const Selection& selection, RowScale scale = RowScale::none,
                       Site site = Site::here());
/// y[indices[n]] = x[n], times scales[n] if asked for; all other rows are 0: x [capacity, ...] -> [M, ...].
/// Rows of x from the count on are not read. Each element of y is written once. dx = gather_selected(dy,
/// selection, scale).
Tensor scatter_selected(const Tensor& x, const Selection& selection, RowScale scale = RowScale::none,
                        Site site = Site::here());

}  // namespace tessera::ops
