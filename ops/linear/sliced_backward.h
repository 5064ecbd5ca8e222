#pragma once

#include <memory>
#include <optional>
#include <string>

#include "ops/select/select.h"

namespace tessera::ops {

/// Which rows the gradient of a sliced operator's weight is summed over.
enum class WeightGrad : uint8_t {
  none,   // no gradient arrives at the weight
  slice,  // those that were chosen, times their scales
  full    // all of them
};
const char* name_of(WeightGrad kind);
/// Throws, naming the kinds, if there is none of that name.
WeightGrad parse_weight_grad(const std::string& name);

/// The rows chosen jointly by several sliced operators, those of one feed-forward network. The call whose
/// backward pass runs first chooses (or, if the rows are known in forward, the call that runs forward first)
/// and applies the scales; the others use the same rows without scaling.
struct SharedRows {
  Selection selection = {};
  std::optional<RandomStream> stream = {};  // that the first call drew
  bool scaled = false;
};

/// A backward pass that multiplies only N of the M rows of dy (M: product of all dimensions but the last).
/// Forward is unchanged. With s_i the scale of a chosen row and 0 for every other:
///   dx_i = s_i dy_i weight      exact zeros in the rows that were not chosen
///   dweight = sum of s_i dy_i^T x_i, or of dy_i^T x_i over all rows, or nothing: `weight_grad`
///   dbias, dresidual            of all rows, as without a slice
/// Scales are applied to the rows of dy, which are rounded to its dtype. Where all rows are chosen (N = M)
/// and the weight gets a gradient, the result is bitwise that of the dense backward pass.
///
/// `first`, `random`: the rows are known before backward, so forward saves N rows only. The other modes look
/// at the norms of dy's rows and keep all of them. `random` and `importance` are unbiased. `threshold`: only
/// the device knows how many rows were chosen, and the host never waits: on a GPU all M rows are multiplied,
/// those that were not chosen as zeros, so it saves no time there.
struct SlicedBackward {
  static constexpr const char* kKind = "slice";

  SelectMode rows = SelectMode::first;
  /// How many: one of the two, for all modes but `threshold`.
  std::optional<int64_t> n = {};         // min(n, M) rows, n >= 1
  std::optional<double> share = {};      // share_of_rows(M, share), 0 < share <= 1
  std::optional<double> threshold = {};  // of the mode of that name: the smallest norm of a row of dy
  WeightGrad weight_grad = WeightGrad::slice;
  /// What `random` and `importance` draw from: a stream per recorded call.
  std::optional<Rng> rng = {};

  /// Of one call: i32 [1] on the device, only the first so many of the M rows may be chosen; `share` is then
  /// of these. Undefined: all. Settings that take all M rows take the others, too, which saves moving rows:
  /// their dy must be 0 then, as that of padding rows is.
  Tensor valid = {};
  std::shared_ptr<SharedRows> shared = {};

  /// The settings, without what belongs to a call.
  void fields(auto&& visit) {
    visit("rows", rows), visit("n", n), visit("share", share), visit("threshold", threshold);
    visit("weight_grad", weight_grad);
  }
  /// Of the settings and the generator.
  bool operator==(const SlicedBackward& other) const;
  /// Throws, beginning with `what`, unless the settings go together.
  void validate(const std::string& what) const;
};

/// "random 10%, weight_grad slice"
std::string to_string(const SlicedBackward& slice);

}  // namespace tessera::ops
