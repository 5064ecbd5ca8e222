#pragma once

#include "ops/gemm/gemm.h"

/// Estimated time of GEMMs, for the choice among the variants of multiply (docs/ops/gemm_narrow.md).

namespace tessera::ops {

/// Bytes of all operands and of d.
double gemm_bytes(const Gemm& gemm);
/// Whether every row of a 16-bit operand starts on a line of memory, 128 bytes. TMA brings rows of so many:
/// of others it asks for two lines each.
bool gemm_on_lines(const void* data, int64_t ld, int64_t stride);
/// What cuBLASLt is expected to take for 16-bit operands, rounded up or as they are. About 30 % off for odd
/// extents.
double gemm_cublas_seconds(const Gemm& gemm);

}  // namespace tessera::ops
