#pragma once

#include "ops/sparse24/sparse24.h"

namespace tessera::ops {

/// y = S(x) weight^T + bias + residual: x [..., in], weight [out, in], bias [out] or undefined, residual
/// [..., out] or undefined -> y [..., out]. S keeps two of four features of each token (Selection24), and the
/// GEMM runs on S(x) as multiply24 does. One floating dtype and device for all.
///
/// Rounding: S(x) to x's dtype, then as multiply24. Saves S(x) in 1.125 bytes per element (of 16 bits), and
/// the weight; not x.
///   dx = (dy weight) at the places that S kept, 0 elsewhere: exact for naive and fast; for the others
///        straight through, as if what they keep were x
///   dweight = dy^T S(x)       sums in f32, rounded once to the dtype in which the leaf keeps its gradient
///   dbias = column sums of dy in f32, dresidual = dy
/// Both GEMMs of the backward pass are dense; the one of dweight reads S(x) decompressed. in = 0 gives the
/// bias (or zeros), no rows give gradients of zero. Throws where sizes, dtypes or devices disagree.
Tensor sparse24_linear(const Tensor& x, const Tensor& weight, const Tensor& bias = {},
                       const Tensor& residual = {}, const Selection24& selection = {},
                       Site site = Site::here());

}  // namespace tessera::ops
