#pragma once

#include "ops/variant.h"
#include "tensor/tensor.h"

/// How linear_swiglu runs on CUDA.

namespace tessera::ops {

/// Names of the variants.
std::vector<std::string> linear_swiglu_variants();
/// What is chosen for y [T, F], x [T, in] and weight [2F, in]; `keeps`: gate and up are kept.
std::string_view linear_swiglu_variant(const Tensor& y, const Tensor& x, const Tensor& weight, bool keeps,
                                       const Gpu& gpu);

/// Variant "epilogue", for T bf16 or f16. h [T, 2F] gets gate and up, or is undefined; `wide`: in tiles of
/// 128 x 256.
template <class T>
void linear_swiglu_sm90(const Tensor& y, const Tensor& h, const Tensor& x, const Tensor& weight, bool wide);

}  // namespace tessera::ops
