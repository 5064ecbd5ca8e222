#pragma once

#include <optional>

#include "runtime/rng.h"
#include "tensor/tensor.h"

namespace tessera::ops {

/// Over the last dimension, of C elements, with weight w [C] (1 if absent) and bias b [C] (0 if absent):
///   layernorm  y = (x - mean(x)) rstd w + b,  rstd = 1 / sqrt(mean((x - mean(x))^2) + eps)
///              Ba, Kiros, Hinton, "Layer Normalization", arXiv:1607.06450
///   rmsnorm    y = x rstd w,                  rstd = 1 / sqrt(mean(x^2) + eps)
///              Zhang, Sennrich, "Root Mean Square Layer Normalization", arXiv:1910.07467
/// Backward, with xhat = (x - mean) rstd (mean 0 in rmsnorm) and g = dy w, means over C:
///   dx = rstd (g - mean(g) - xhat mean(g xhat))     without mean(g) in rmsnorm
///   dweight = sum over rows of dy xhat              dbias = sum over rows of dy
///
/// x is floating, of rank 1 or more and any layout; weight and bias have its dtype and device. Rounding:
/// computed in f32 (f64 for f64), sums on the CPU in f64, y and dx rounded once; dweight and
/// dbias are f32 (f64). Kept for backward: x, weight, and mean and rstd of every row in f32 (f64). Sums have
/// a fixed order on every device. A row whose squares overflow f32 has rstd 0. Throws for shapes, dtypes or
/// devices that do not agree, and for a negative eps.
Tensor layernorm(const Tensor& x, const Tensor& weight = {}, const Tensor& bias = {}, double eps = 1e-5,
                 Site site = Site::here());
Tensor rmsnorm(const Tensor& x, const Tensor& weight = {}, double eps = 1e-6, Site site = Site::here());

/// Dropout of a residual on its way to a sum, as ops::dropout does it.
struct ResidualDropout {
  double p = 0;                 // chance of an element to be dropped, 0 <= p < 1; 0 draws nothing
  std::optional<Rng> rng = {};  // gives one stream a call
};

/// sum = x + residual, y = the norm of sum: what stands between two parts of a transformer. Pre-norm blocks
/// use both results, post-norm blocks y alone.
struct AddNorm {
  Tensor sum, y;
};

/// y = layernorm(sum) or rmsnorm(sum) as above, sum = x + residual rounded to the dtype first, so that the
/// results are those of ops::add and the norm one after the other, read and written once. Backward, for the
/// gradients of both results, either of which may be absent:
///   dx = dresidual = dsum + (the norm's dx for dy)      added in f32 (f64), rounded once
/// and dweight and dbias as above, from dy. Kept for backward: sum, weight, mean and rstd. x and residual
/// have one shape, dtype and device and any layout; nothing is broadcast.
///
/// `dropout`: sum = x + z residual / (1 - p) with the mask z of 0 and 1 that ops::dropout draws from the same
/// stream, rounded once (ops::dropout and ops::add round twice); dresidual = z dx / (1 - p) of the dx that is
/// not rounded yet. On CUDA a bit an element is kept for backward, the CPU draws the mask again; a replayed
/// graph draws a new one each time, as eager calls do.
///
/// Throws for what the norms throw for, where x and residual do not agree, for p outside [0, 1) and for p > 0
/// without `rng`.
AddNorm add_layernorm(const Tensor& x, const Tensor& residual, const Tensor& weight = {},
                      const Tensor& bias = {}, double eps = 1e-5, ResidualDropout dropout = {},
                      Site site = Site::here());
AddNorm add_rmsnorm(const Tensor& x, const Tensor& residual, const Tensor& weight = {}, double eps = 1e-6,
                    ResidualDropout dropout = {}, Site site = Site::here());

}  // namespace tessera::ops
