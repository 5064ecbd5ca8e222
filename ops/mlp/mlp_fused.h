#pragma once

#include <string>

#include "ops/activation/activation.h"

/// Variant "fused", numbered after those of GEMMs: the whole layer in one kernel (mlp_fused_sm90.cuh).

namespace tessera::ops {

/// What it needs and these tensors lack, or an empty string, as it is where x or y is empty. y [T, E], x [T,
/// D], up [F, D], down [E, F].
std::string fused_mlp_lacks(const Tensor& y, const Tensor& x, const Tensor& up, const Tensor& down,
                            const Tensor& residual);
/// y = f(x up^T + up_bias) down^T + down_bias + residual, the hidden rows rounded as elsewhere, the residual
/// added before y is rounded.
void fused_mlp(const Tensor& y, const Tensor& x, const Tensor& up, const Tensor& down, const Tensor& up_bias,
               const Tensor& down_bias, const Tensor& residual, Activation kind);

/// The launch, for T bf16 or f16.
template <class T>
void fused_mlp_cuda(const Tensor& y, const Tensor& x, const Tensor& up, const Tensor& down,
                    const Tensor& up_bias, const Tensor& down_bias, const Tensor& residual, Activation kind);

}  // namespace tessera::ops
