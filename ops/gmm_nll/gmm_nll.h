#pragma once

#include "ops/reduction.h"
#include "tensor/tensor.h"

namespace tessera::ops {

/// Negative log-likelihood of y under a mixture of K Gaussians, whose parameters lie in the last two
/// dimensions of params [..., K, 3] in the order (logit_weight w, mu, log_sigma s); y is [...]:
///   loss = -logsumexp_k(log_softmax(w)_k - ((y - mu_k) / sigma_k)^2 / 2 - s_k - log(2 pi) / 2)
/// mean divides by the number of elements of y (NaN if there are none), sum of nothing is 0, none keeps y's
/// shape. Bishop, "Mixture Density Networks", 1994, gives the gradients: with z_k = (y - mu_k) / sigma_k, the
/// weights pi = softmax(w), the responsibilities r = softmax_k(the exponents above) and the gradient g of the
/// element's loss (1 / count for the mean)
///   dw_k = g (pi_k - r_k)       dmu_k = -g r_k z_k / sigma_k
///   ds_k = g r_k (1 - z_k^2)    dy = g sum_k r_k z_k / sigma_k
///
/// params and y are floating, of one device and any layout; y has the dtype of params, or f32 next to bf16 or
/// f16 (a target rounded to 16 bits would be another target); dy has y's dtype. Both sums of exponentials are
/// shifted by their largest term, and the weights' first of all, so logits of any size are right; a logit of
/// -inf switches its component off. exp(-log_sigma) is at most the largest number (log_sigma >= -88.7 in f32
/// is exact), so that z_k is 0 at y = mu_k for any log_sigma. A component whose responsibility r_k underflows
/// to 0, z_k^2 infinite included, has gradient 0 but for its weight. Where the density itself is 0 (every
/// z_k^2 infinite) the loss is infinite and the gradients are NaN.
/// Rounding: computed in f32 (f64 for f64). The loss is f32 (f64), not rounded further; sum and mean are
/// added in a fixed order, on the CPU and across the threads of a GPU in double; dparams and dy are rounded
/// once. Backward keeps params and y. On a GPU, forward makes dparams and dy of the sum or mean itself while
/// a tape records, for the gradient that Tape::backward(loss) begins with (1, or the tape's loss scale), and
/// these live until backward: if that gradient arrives nothing is left to do, else they are recomputed.
/// Throws for shapes, dtypes or devices that do not agree.
Tensor gmm_nll(const Tensor& params, const Tensor& y, Reduction reduction = Reduction::mean,
               Site site = Site::here());

}  // namespace tessera::ops
