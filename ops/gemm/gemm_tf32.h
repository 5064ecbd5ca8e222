#pragma once

#include "ops/gemm/gemm.h"

/// GEMMs of f32 in TF32 on a GPU: what is rearranged before cuBLASLt gets them (docs/ops/gemm.md). Chosen in
/// the table of gemm_padding.cpp, if no variant of GEMMs is forced.
///
/// Tensor cores read TF32 from shared memory K-major only, so cuBLASLt's fast kernels need operands
/// stored that way, as in y = x W^T. Gradients are not: for dx = dy W the weight is small, so a
/// transposed copy pays; for dW = dy^T x both operands are large, and cuBLASLt's slower kernels read them
/// in place. The latter use split-K, as a batch, if their output tiles would leave the last wave of SMs
/// half empty.

namespace tessera::ops {

struct CublasGemm;

/// Copying b so that it is K-major, and split-K: what they need, whether they pay, and the GEMM. Partial sums
/// are added in order, in f32.
Reason tf32_transposed_lacks(const CublasGemm& gemm, const Gpu& gpu);
Estimate tf32_transposed_estimate(const CublasGemm& gemm, const Gpu& gpu);
void run_tf32_transposed(const CublasGemm& gemm);
Reason tf32_parts_lacks(const CublasGemm& gemm, const Gpu& gpu);
Estimate tf32_parts_estimate(const CublasGemm& gemm, const Gpu& gpu);
void run_tf32_parts(const CublasGemm& gemm);

/// y [c, r] = x [r, c]^T, f32; y is packed or pitched, x has dense rows.
void transposed_copy_cuda(const Tensor& y, const Tensor& x);

}  // namespace tessera::ops
