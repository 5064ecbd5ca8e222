#pragma once

#include "ops/gmm_nll/gmm_nll.h"

namespace tessera::ops {

/// All tensors are packed. loss: of y's shape for Reduction::none, else of rank 0; in sum_dtype.
void gmm_nll_forward_cpu(const Tensor& loss, const Tensor& params, const Tensor& y, Reduction reduction);
/// If dparams or dy is defined (not for Reduction::none), also the gradients for dloss (of rank 0; undefined:
/// 1).
void gmm_nll_forward_cuda(const Tensor& loss, const Tensor& dparams, const Tensor& dy, const Tensor& dloss,
                          const Tensor& params, const Tensor& y, Reduction reduction);
/// dparams and dy (undefined if not wanted) from the loss's gradient.
void gmm_nll_backward_cpu(const Tensor& dparams, const Tensor& dy, const Tensor& dloss, const Tensor& params,
                          const Tensor& y, Reduction reduction);
/// `made`: they hold the gradients for a dloss of made_for (undefined: 1) already.
void gmm_nll_backward_cuda(const Tensor& dparams, const Tensor& dy, const Tensor& dloss, const Tensor& params,
                           const Tensor& y, Reduction reduction, bool made, const Tensor& made_for);

}  // namespace tessera::ops
