#pragma once

#include "ops/variant.h"
#include "tensor/tensor.h"

/// GEMMs whose epilogue computes a function of their result, next to the GEMM and a pass of its own:
/// gemm_sm90.cuh with an epilogue of an operator, on compute capability 9.0, in bf16 and f16.

namespace tessera::ops {

/// Whether TMA can read the matrix, or the batch of them.
bool is_tma_readable(const Tensor& x);
/// Whether it can write it, too: rows end on 16-byte boundaries, or in padding that is theirs.
bool is_tma_writable(const Tensor& x);

/// Such a GEMM. Its tensors are matrices with the tokens along the rows, or batches of them.
struct FusedGemm {
  const char* function;  // its name; null: there is none to compute
  bool transposed;       // it multiplies by the transpose of the second operand
  bool gated;            // the second operand has two rows per column of the result, gates first
  int passes;            // kernels that the epilogue saves,
  int moved;             // and what they read and write, in elements per element of the first result
  /// Results, and what is read: the GEMM's operands and then those of the epilogue. Null or undefined: none.
  const Tensor *written[2], *read[3];
};

std::string describe_problem(const FusedGemm& fused);

/// What the epilogue needs and the problem lacks.
Reason fused_gemm_lacks(const FusedGemm& fused, const Gpu& gpu);
/// Whether the GEMM runs with the epilogue: wherever it can, unless a variant of GEMMs other than "wgmma" is
/// forced, or its tiles are so few that a GEMM that splits k is clearly faster.
bool fused_gemm_runs(const FusedGemm& fused, const Gpu& gpu);
/// Whether to run it in tiles of 128 x 256 instead of 128 x 128.
bool fused_gemm_is_wide(const FusedGemm& fused, const Gpu& gpu);

}  // namespace tessera::ops
