#pragma once

#include "ops/gemm/gemm.h"

/// GEMMs of f32 in TF32 on a GPU: what is rearranged before cuBLASLt gets them (docs/ops/gemm.md).
///
/// Tensor cores read TF32 from shared memory K-major alone, so cuBLASLt's fast kernels are those whose
/// operands are stored that way: y = x W^T. The gradients' operands are not. Of dx = dy W the weight is
/// small, so a transposed copy pays; of dW = dy^T x both are long, and cuBLASLt's slower kernels read them as
/// they are. Those get k in parts, as a batch, where their output tiles would leave the last wave of SMs half
/// empty.

namespace tessera::ops {

/// d = alpha a b (+ d) (+ bias) as multiply has it; false, and nothing done, where nothing of this pays.
/// Stored rows are dense (see Gemm). With parts of k the sums of the parts are added in order, in f32.
/// tuning::ForceRow("gemm", row) turns it off.
bool multiply_tf32(const Tensor& d, const Tensor& a, const Tensor& b, const MultiplyOptions& options,
                   bool transpose_a, bool transpose_b);

/// y [c, r] = x [r, c]^T, f32; y is packed or pitched, x has dense rows.
void transposed_copy_cuda(const Tensor& y, const Tensor& x);

}  // namespace tessera::ops
