#pragma once

#include "autograd/tape.h"
#include "ops/gemm/gemm.h"
#include "ops/sum_dtype.h"

/// The gradients of weights that multiply24 makes.

namespace tessera::ops {

/// Hands the gradient of `weight`, which `multiply(d, accumulate)` writes or adds to d, to that input. Sums
/// of several calls are f32 (f64 for f64).
template <class F>
void give_weight_gradient24(Backward& b, int input, const Tensor& weight, F&& multiply) {
  const DType wide = sum_dtype(weight.dtype());
  GradTarget target = b.target(input);
  if (!target.grad.defined() || target.grad.dtype() != wide || !writable(target.grad))
    target = {Tensor::empty(weight.shape(), wide, weight.device()), false};
  multiply(target.grad, target.accumulate);
  b.written(input, target);
}

}  // namespace tessera::ops
