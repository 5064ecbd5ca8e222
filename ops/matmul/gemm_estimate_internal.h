#pragma once

#include "ops/matmul/gemm.h"

/// Estimated time of GEMMs, for the choice among the variants of multiply (docs/ops/gemm_narrow.md).

namespace tessera::ops {

/// Bytes of all operands and of d.
double gemm_bytes(const Gemm& gemm);
/// What cuBLASLt is expected to take for 16-bit operands, rounded up or as they are. About 30 % off for odd
/// extents.
double gemm_cublas_seconds(const Gemm& gemm);

}  // namespace tessera::ops
