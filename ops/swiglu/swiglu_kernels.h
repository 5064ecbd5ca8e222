#pragma once

#include "ops/swiglu/swiglu.h"

/// All tensors of one shape; any strides. dgate and dup may each be undefined.

namespace tessera::ops {

/// y [..., F] of packed x [..., 2F] (gate, then up).
void swiglu_forward(const Tensor& y, const Tensor& x);
/// The gradient of packed x [..., 2F] (gate, then up) from dy [..., F].
Tensor swiglu_gradient(const Tensor& dy, const Tensor& x);

void swiglu_forward_cpu(const Tensor& y, const Tensor& gate, const Tensor& up);
void swiglu_forward_cuda(const Tensor& y, const Tensor& gate, const Tensor& up);
void swiglu_backward_cpu(const Tensor& dgate, const Tensor& dup, const Tensor& dy, const Tensor& gate,
                         const Tensor& up);
void swiglu_backward_cuda(const Tensor& dgate, const Tensor& dup, const Tensor& dy, const Tensor& gate,
                          const Tensor& up);

}  // namespace tessera::ops
