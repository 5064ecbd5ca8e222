#pragma once

#include "ops/linear/slice.h"

namespace tessera::ops {

/// y = silu(x gate^T) (x up^T): the first half of LLaMA's feed-forward layer (Shazeer, arXiv:2002.05202,
/// equation 6, without biases). x [..., in], weight [2F, in]: gate's rows, then up's -> y [..., F].
///
/// The same as swiglu(linear(x, weight)), and that is what it runs, with its gradients and its rounding of
/// gate and up to the dtype. On CUDA, in bf16 or f16 and without a tape, one kernel does both: for up to 8
/// rows of x variant "gemv", for up to 64 "wgmma" (gemm_sm90_stream.cuh) where it is expected to be faster;
/// gate and up then stay f32 and y alone is rounded. Throws what those two throw.
Tensor linear_swiglu(const Tensor& x, const Tensor& weight, Site site = Site::here());
/// The same with a sliced backward pass: rows of dy are chosen once, and the gradients of gate and up, of the
/// weight and of x are made of these N rows. `full` makes those of gate and up for all rows.
Tensor linear_swiglu(const Tensor& x, const Tensor& weight, const Slice& slice, Site site = Site::here());

}  // namespace tessera::ops
