#pragma once

#include "ops/linear/sliced_backward.h"
#include "ops/variant.h"

/// The rows of one call of a sliced operator, from its forward pass to its backward pass. Shared by linear,
/// mlp and linear_swiglu.

namespace tessera {
class Backward;  // autograd/backward.h
}  // namespace tessera

namespace tessera::ops {

/// How a GPU computes the rows `indices` (undefined: the first ones) of dx [M, in], of dy_rows [N, out] and
/// weight: "separate" or "scatter".
std::string_view sliced_dx_variant(const Tensor& dx, const Tensor& dy_rows, const Tensor& weight,
                                   const Tensor& indices, const Gpu& gpu);

class SlicedRows {
 public:
  /// In forward, for dy of `rows` rows. Reserves a random stream if the mode needs one, and chooses already
  /// if that does not need the gradient. Throws, beginning with `op`, if the settings are inconsistent.
  SlicedRows(const char* op, const SlicedBackward& slice, int64_t rows, Device device);

  /// Whether every row is multiplied as it is.
  bool all() const { return all_; }
  /// Whether it is the dense backward pass.
  bool is_dense() const { return all_ && slice_.weight_grad != WeightGrad::none; }
  /// Which rows the weight's gradient sums over: rows that arrive as zeros need not be summed.
  WeightGrad weight_grad() const;
  /// What forward saves of x [..., C] for take_kept: its chosen rows if they are known, else x.
  Tensor keep(const Tensor& x) const;

  // In backward: first choose, with the gradient that arrives.
  void choose(const Tensor& dy);
  /// The chosen rows of x [..., C], in index order: [N, C]; rows from the count on are zero.
  Tensor take(const Tensor& x) const;
  /// The same of what keep gave, which is x itself where all rows are multiplied.
  Tensor take_kept(const Tensor& kept) const { return is_known() && !all_ ? kept : take(kept); }
  /// The chosen rows of dy, times their scales.
  Tensor take_scaled(const Tensor& dy) const;
  /// Hands dy_rows weight, with zeros in the other rows, to input number `input` of the entry, of shape
  /// `shape`, if it wants a gradient: dy_rows [N, out], weight [out, in]. Where there is a gradient to add
  /// to, the other rows are not touched, and each sum is rounded once.
  void give_input_gradient(Backward& entry, int input, const Shape& shape, const Tensor& dy_rows,
                           const Tensor& weight) const;

 private:
  bool is_known() const;
  bool is_drawn() const;
  RandomStream draw() const;
  Selection select(const Tensor& norms) const;
  void use(const Selection& selection);
  void write_rows(const Tensor& dx, const Tensor& dy_rows, const Tensor& weight, bool accumulate) const;

  SlicedBackward slice_;
  int64_t rows_;       // M
  int64_t count_ = 0;  // N, or as many as there may be
  Device device_;
  bool all_ = false;
  bool is_prefix_ = false;  // the first rows, as they are: views take the place of gathers
  bool scales_ = false;     // this call applies the scales
  RandomStream stream_ = {};
  Selection selection_;  // undefined for a prefix, and before the choice
};

}  // namespace tessera::ops
