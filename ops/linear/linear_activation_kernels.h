#pragma once

#include "ops/activation/activation.h"
#include "ops/variant.h"

/// The parts of linear_activation that other operators with counted activations share.

namespace tessera::ops {

/// y = f(x weight^T + bias) and its counts, off the tape: matrices with the tokens along the rows; counts i32
/// [out], packed, or undefined: not wanted. f: none, relu or relu_squared.
void linear_activation_forward(const Tensor& y, const Tensor& counts, const Tensor& x, const Tensor& weight,
                               const Tensor& bias, Activation kind);

/// dh = dy f'(h), by y = f(h): floating, of one shape. dh may be dy.
void activation_gradient_of_result(const Tensor& dh, const Tensor& dy, const Tensor& y, Activation kind);

/// counts [C] i32, packed, of x [R, C].
void column_counts_cpu(const Tensor& counts, const Tensor& x);
void column_counts_cuda(const Tensor& counts, const Tensor& x);

void activation_gradient_of_result_cpu(const Tensor& dh, const Tensor& dy, const Tensor& y, Activation kind);
void activation_gradient_of_result_cuda(const Tensor& dh, const Tensor& dy, const Tensor& y, Activation kind);

/// Variant "epilogue", or "epilogue wide", for T bf16 or f16: adds to the counts, which must be zero.
template <class T>
void linear_activation_sm90(const Tensor& y, const Tensor& counts, const Tensor& x, const Tensor& weight,
                            const Tensor& bias, Activation kind, bool wide);

}  // namespace tessera::ops
