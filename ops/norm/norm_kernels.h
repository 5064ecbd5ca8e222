#pragma once

#include "ops/dropout/dropout_kernels.h"
#include "ops/norm/norm.h"

namespace tessera::ops {

/// Layernorm if `mean` is defined, else rmsnorm, of x, or of x + residual if that is defined; then `sum`
/// takes x + residual, rounded. y, sum, x, residual: have rows, one shape; mean, rstd [rows] in sum_dtype;
/// weight and bias [C] of x's dtype with stride 1, or undefined. `drop`: the residual's mask, or null.
struct NormForward {
  const Tensor &y, &sum, &mean, &rstd, &x, &residual, &weight, &bias;
  double eps;
  const DropoutMask* drop;
};
void norm_forward_cpu(const NormForward& norm);
void norm_forward_cuda(const NormForward& norm);

/// x: what was normalised. dx has dsum added to it if that is defined; dresidual is dx before it was rounded
/// under the mask `drop`, and undefined without one. Gradients that are undefined are not computed. dweight,
/// dbias: [C] in sum_dtype; on CUDA also both in x's dtype, rounded once.
struct NormBackward {
  const Tensor &dx, &dresidual, &dweight, &dbias, &dy, &dsum, &x, &weight, &mean, &rstd;
  const DropoutMask* drop;
};
void norm_backward_cpu(const NormBackward& norm);
void norm_backward_cuda(const NormBackward& norm);

}  // namespace tessera::ops
