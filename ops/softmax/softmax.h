#pragma once

#include "tensor/tensor.h"

namespace tessera::ops {

/// Along `dim` (negative: from the end), with m = max(x) of the line:
///   softmax      y_i = exp(x_i - m) / sum_j exp(x_j - m)      dx = y (dy - sum(y dy))
///   log_softmax  y_i = (x_i - m) - log sum_j exp(x_j - m)     dx = dy - exp(y) sum(dy)
/// x and y are floating, of any shape of rank 1 or more and any layout. An element of -inf gets probability
/// 0; a line of -inf only, or one that holds +inf or NaN, is NaN throughout, since it has no distribution.
/// Rounding: computed in f32 (f64 for f64), sums on the CPU in f64, y rounded once. Backward keeps y, as
/// rounded; dx is rounded once. Throws for an unsupported dtype, a tensor of rank 0, or a dimension that x
/// does not have.
Tensor softmax(const Tensor& x, int dim = -1, Site site = Site::here());
Tensor log_softmax(const Tensor& x, int dim = -1, Site site = Site::here());

}  // namespace tessera::ops
