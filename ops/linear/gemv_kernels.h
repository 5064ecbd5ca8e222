#pragma once

#include "ops/variant.h"
#include "tensor/tensor.h"

/// Variant "gemv" of linear and linear_swiglu on CUDA: up to 8 rows of x, the tokens of a step of generation.
/// See gemv.cuh and docs/ops/linear.md.

namespace tessera::ops {

/// What the variant needs and the problem lacks. x [T, in], weight [out, in].
Reason gemv_lacks(const Tensor& x, const Tensor& weight, const Gpu& gpu);
/// Whether it is as fast as a GEMM.
bool gemv_pays(const Tensor& x, const Tensor& weight, const Gpu& gpu);

/// y [T, out] = x weight^T + bias (or undefined): f32, bf16 and f16, sums in f32 in a fixed order, rounded
/// once.
void gemv_cuda(const Tensor& y, const Tensor& x, const Tensor& weight, const Tensor& bias);
/// y [T, F] = silu(x gate^T) (x up^T), weight [2F, in] gate first: bf16 and f16. Rounded once: gate and up
/// stay f32.
void gemv_swiglu_cuda(const Tensor& y, const Tensor& x, const Tensor& weight);

}  // namespace tessera::ops
