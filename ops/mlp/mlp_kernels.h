#pragma once

#include "ops/activation/activation.h"
#include "ops/variant.h"

/// The two GEMMs of an MLP next to its activation, with the activation in their epilogues: compute
/// capability 9.0, bf16 and f16. All tensors are matrices with the tokens along the rows; those of the
/// gradient may also be batches of them, [K, T, ...] and down [K, E, F], for K products with weights of their
/// own.

namespace tessera::ops {

/// Whether fused_up computes a [T, F] and h [T, F] (undefined: not kept) from x [T, D] and up [F, D]:
/// wherever it can, unless a variant of GEMMs other than "wgmma" is forced, or its tiles are so few that a
/// GEMM that splits D is clearly faster.
bool fuses_up(const Tensor& a, const Tensor& h, const Tensor& x, const Tensor& up, Activation kind,
              const Gpu& gpu);
/// h = x up^T + bias and a = f(h), both rounded to their dtype, a from the rounded h.
void fused_up(const Tensor& a, const Tensor& h, const Tensor& x, const Tensor& up, const Tensor& bias,
              Activation kind);

/// Whether fused_down_gradient computes dh [T, F] and a [T, F] (undefined: not wanted) from dy [T, E], down
/// [E, F] and h [T, F]. dh and a may have more columns than down and h, which get f(0) in a and 0 in dh.
bool fuses_down_gradient(const Tensor& dh, const Tensor& a, const Tensor& dy, const Tensor& down,
                         const Tensor& h, Activation kind, const Gpu& gpu);
/// dh = (dy down) f'(h), the GEMM's result rounded before, and a = f(h).
void fused_down_gradient(const Tensor& dh, const Tensor& a, const Tensor& dy, const Tensor& down,
                         const Tensor& h, Activation kind);

/// The launches, for T bf16 or f16.
template <class T>
void fused_up_cuda(const Tensor& a, const Tensor& h, const Tensor& x, const Tensor& up, const Tensor& bias,
                   Activation kind);
template <class T>
void fused_down_gradient_cuda(const Tensor& dh, const Tensor& a, const Tensor& dy, const Tensor& down,
                              const Tensor& h, Activation kind);

}  // namespace tessera::ops
