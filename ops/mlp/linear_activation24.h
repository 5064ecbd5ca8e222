#pragma once

#include "ops/activation/activation.h"
#include "ops/sparse24/sparse24.h"

namespace tessera::ops {

struct LinearActivation24 {
  Sparse24 kept;  // S(a) along features, zeros in the dense columns
  Tensor counts;  // i32 [F]: elements of a that are not zero, before any are dropped
  Tensor dense;   // a in the dense columns, [T, n]; undefined without
};

/// The first layer of a 2:4 feed-forward network, whose a = f(x weight^T + bias) exists compressed only:
/// x [T, D], weight [F, D], bias [F] or undefined; f relu or relu_squared. S keeps the two largest of every
/// four features of a token (naive); `columns`, i32 [n] without repetition or undefined, names the columns
/// that are kept as they are. They must be known before the GEMM ends: those of the largest counts of an
/// earlier call are, which is why mlp_sparse24 takes its `previous`. Rounding and counts as of
/// linear_activation. No gradient is recorded. Throws where sizes, dtypes or devices disagree, and on the CPU
/// for a column outside [0, F) or named twice; on a GPU, where the host would have to wait, a column outside
/// is skipped, and what `dense` holds for it is undefined.
///
/// Variants on a GPU, to the same bits where the GEMMs' sums agree:
///   epilogue  compute capability 9.0, bf16 and f16, operands that TMA can read: one GEMM, whose epilogue
///             selects, counts, and stores 1.125 bytes per element and the dense columns
///   separate  every dtype: linear_activation, the columns taken out, compress24
LinearActivation24 linear_activation24(const Tensor& x, const Tensor& weight, Activation kind,
                                       const Tensor& bias = {}, const Tensor& columns = {},
                                       Site site = Site::here());

}  // namespace tessera::ops
