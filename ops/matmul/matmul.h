#pragma once

#include "tensor/tensor.h"

namespace tessera::ops {

/// y = op(a) op(b): op(a) [..., M, K], op(b) [..., K, N] -> y [..., M, N]; op swaps the last two dimensions
/// if asked to. Leading dimensions broadcast (NumPy's rule). Any strided views: a matrix with dense rows or
/// columns is read as it is, any other copied. One floating dtype and device for both.
///
/// Rounding: sums in f32 (f64 for f64), rounded once; f32 operands as f32_math() says. Saves a and b.
///   da = dy op(b)^T and db = op(a)^T dy, in their own orientation; over broadcast dimensions summed: as one
///   GEMM with a longer k where the layouts allow it, else GEMM by GEMM in a fixed order, in f32.
/// K = 0 gives zeros. Throws where sizes, dtypes or devices disagree.
Tensor matmul(const Tensor& a, const Tensor& b, bool transpose_a = false, bool transpose_b = false,
              Site site = Site::here());

}  // namespace tessera::ops
