#pragma once

#include "ops/linear/sliced_backward.h"

namespace tessera::ops {

/// y = x weight^T + bias + residual: x [..., in], weight [out, in], bias [out] or undefined, residual [...,
/// out] or undefined -> y [..., out]. One floating dtype and device for all.
///
/// Rounding: sums in f32 (f64 for f64), the bias added to them, rounded once to y's dtype. A residual is
/// added before that in variants "wgmma" and "narrow" if it lies as y does (and on the CPU), else to the
/// rounded result, which is rounded again. Saves the weight, and x if the weight wants a gradient. dresidual
/// = dy.
///   dx = dy weight            rounded to x's dtype
///   dweight = dy^T x          sums in f32, rounded once to the dtype in which the leaf keeps its gradient
///   dbias = column sums of dy in f32
/// in = 0 gives the bias (or zeros), no rows give gradients of zero. Throws where sizes, dtypes or devices
/// disagree.
Tensor linear(const Tensor& x, const Tensor& weight, const Tensor& bias = {}, const Tensor& residual = {},
              Site site = Site::here());
/// The same with a sliced backward pass. Saves the weight, and of x what the weight's gradient is summed
/// over. dresidual = dy. Throws, in addition, unless the slice's settings go together.
Tensor linear(const Tensor& x, const Tensor& weight, const Tensor& bias, const Tensor& residual,
              const SlicedBackward& slice, Site site = Site::here());

}  // namespace tessera::ops
