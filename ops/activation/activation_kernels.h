#pragma once

#include "ops/activation/activation.h"

namespace tessera::ops {

void activation_forward_cpu(const Tensor& y, const Tensor& x, Activation kind);
void activation_forward_cuda(const Tensor& y, const Tensor& x, Activation kind);
/// dx = dy f'(x)
void activation_backward_cpu(const Tensor& dx, const Tensor& dy, const Tensor& x, Activation kind);
void activation_backward_cuda(const Tensor& dx, const Tensor& dy, const Tensor& x, Activation kind);

}  // namespace tessera::ops
