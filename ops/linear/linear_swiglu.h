#pragma once

#include "ops/linear/sliced_backward.h"

namespace tessera::ops {

/// y = silu(x gate^T) (x up^T): the first half of LLaMA's feed-forward layer (Shazeer, arXiv:2002.05202,
/// equation 6, without biases). x [..., in], weight [2F, in]: gate's rows, then up's -> y [..., F].
///
/// The same as swiglu(linear(x, weight)), with its gradients and its rounding of gate and up to the dtype;
/// saves x, the weight, gate and up. On CUDA, in bf16 or f16, one kernel does both: "epilogue" (compute
/// capability 9.0, F a multiple of 8), in which silu is within 2^-12 |x| in bf16, 2^-20 |x| in f16. Without a
/// tape also "gemv" for up to 8 rows of x, and for up to 64 "wgmma" (gemm_sm90_stream.cuh) where it is
/// expected to be faster; in these two gate and up stay f32 and y alone is rounded. Throws what swiglu and
/// linear throw.
Tensor linear_swiglu(const Tensor& x, const Tensor& weight, Site site = Site::here());
/// The same with a sliced backward pass: rows of dy are chosen once, and the gradients of gate and up, of the
/// weight and of x are made of these N rows. `full` makes those of gate and up for all rows.
Tensor linear_swiglu(const Tensor& x, const Tensor& weight, const SlicedBackward& slice,
                     Site site = Site::here());

}  // namespace tessera::ops
