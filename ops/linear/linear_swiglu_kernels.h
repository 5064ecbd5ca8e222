#pragma once

#include "ops/variant.h"
#include "tensor/tensor.h"

/// The parts of linear_swiglu that mlp_swiglu shares.

namespace tessera::ops {

/// y [T, F] = silu(x gate^T) (x up^T) of x [T, in] and weight [2F, in]. `h`, unless null, gets gate and up,
/// rounded, [T, 2F], which a backward pass needs.
void linear_swiglu_forward(const Tensor& y, Tensor* h, const Tensor& x, const Tensor& weight);

/// Names of the variants.
std::vector<std::string> linear_swiglu_variants();
/// What is chosen for y [T, F], x and weight; `keeps`: with h.
std::string_view linear_swiglu_variant(const Tensor& y, const Tensor& x, const Tensor& weight, bool keeps,
                                       const Gpu& gpu);

/// Variant "epilogue", for T bf16 or f16. h may be undefined; `wide`: in tiles of 128 x 256.
template <class T>
void linear_swiglu_sm90(const Tensor& y, const Tensor& h, const Tensor& x, const Tensor& weight, bool wide);

}  // namespace tessera::ops
