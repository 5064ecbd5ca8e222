#pragma once

#include "ops/activation/activation.h"

/// The activations off the tape, on the device of their operands.

namespace tessera::ops {

/// y = f(x); y may be x.
void activation_forward(const Tensor& y, const Tensor& x, Activation kind);
/// dx = dy f'(x); dx may be dy.
void activation_backward(const Tensor& dx, const Tensor& dy, const Tensor& x, Activation kind);

}  // namespace tessera::ops
