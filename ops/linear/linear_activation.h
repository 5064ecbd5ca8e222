#pragma once

#include "ops/activation/activation.h"

namespace tessera::ops {

/// What a linear layer with an activation leaves: its result, and how many elements of each column of it are
/// not zero.
struct ActivatedLinear {
  Tensor y;       // [..., out]
  Tensor counts;  // i32 [out]; on y's device
};

/// y = f(x weight^T + bias) with f none, relu or relu_squared: x [..., in], weight [out, in], bias [out] or
/// undefined -> y [..., out], and per column the number of elements of y, as it is stored (rounded), that are
/// not zero: -0 is zero, a NaN is not. One floating dtype and device for all.
///
/// Rounding: h = x weight^T + bias to x's dtype, y = f(h) from the rounded h, sums in f32 (f64 for f64).
/// Saves x, the weight and y; not h: the slope of relu is 1 where y is not 0, that of relu_squared 2 sqrt(y),
/// so where y underflows to 0 the gradient is 0. relu_squared overflows f16 from |h| = 256 on.
///   dh = dy f'(h), rounded to x's dtype; dx = dh weight; dweight = dh^T x and dbias, as linear
/// Counts are exact integers and carry no gradient.
///
/// Variants "epilogue" and "epilogue wide" (compute capability 9.0, bf16 and f16, relu and relu_squared) make
/// y and the counts in the GEMM's epilogue, with tiles of 128 x 128 or 128 x 192; "separate" runs GEMM,
/// activation and counts one after the other. Throws for another activation, and where sizes, dtypes or
/// devices disagree. Source of the statistic: Haziza et al., arXiv:2503.16672, section 3.2.
ActivatedLinear linear_activation(const Tensor& x, const Tensor& weight, Activation kind,
                                  const Tensor& bias = {}, Site site = Site::here());

/// The number of elements of each column that are not zero (-0 is zero, a NaN is not): x [..., C], floating
/// -> i32 [C]. Throws for a scalar and for 2^31 rows or more. No gradient flows through it.
Tensor column_counts(const Tensor& x, Site site = Site::here());

}  // namespace tessera::ops
