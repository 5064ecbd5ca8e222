#pragma once

#include "ops/gemm/gemm.h"

/// GEMMs of f32 in TF32 on a GPU: what is rearranged before cuBLASLt gets them (docs/ops/gemm.md). Chosen in
/// the table of gemm_padding.cpp, if no variant of GEMMs is forced.
///
/// Tensor cores read TF32 from shared memory K-major alone, so cuBLASLt's fast kernels are those whose
/// operands are stored that way: y = x W^T. The gradients' operands are not. Of dx = dy W the weight is
/// small, so a transposed copy pays; of dW = dy^T x both are long, and cuBLASLt's slower kernels read them as
/// they are. Those get k in parts, as a batch, where their output tiles would leave the last wave of SMs half
/// empty.

namespace tessera::ops {

struct CublasGemm;

/// Whether b is copied with k along its rows, or k is summed in parts: what they need, whether that pays, and
/// the GEMM. With parts of k the sums of the parts are added in order, in f32.
Reason tf32_transposed_lacks(const CublasGemm& gemm, const Gpu& gpu);
Estimate tf32_transposed_estimate(const CublasGemm& gemm, const Gpu& gpu);
void run_tf32_transposed(const CublasGemm& gemm);
Reason tf32_parts_lacks(const CublasGemm& gemm, const Gpu& gpu);
Estimate tf32_parts_estimate(const CublasGemm& gemm, const Gpu& gpu);
void run_tf32_parts(const CublasGemm& gemm);

/// y [c, r] = x [r, c]^T, f32; y is packed or pitched, x has dense rows.
void transposed_copy_cuda(const Tensor& y, const Tensor& x);

}  // namespace tessera::ops
