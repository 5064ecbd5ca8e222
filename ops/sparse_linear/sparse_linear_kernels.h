#pragma once

#include "ops/sparse_linear/sparse_linear.h"
#include "ops/variant.h"

namespace tessera::ops {

/// One part of a call, its operands checked: y [T, out] and residual [T, out] may be columns of wider
/// matrices, x is [T, in]. Undefined: not given.
struct SparseCall {
  const Tensor& y;
  const Tensor& x;
  const SparseWeight& weight;
  const Gate& gate;
  const Tensor& bias;
  const Tensor& residual;
};

void sparse_linear_cpu(const SparseCall& call);

/// The variants on CUDA (sparse_linear.h). What they need beyond their format and number of tokens, `lacks`
/// of the table in sparse_linear.cpp says.
void sparse_columns_cuda(const SparseCall& call);
void sparse_tiles_cuda(const SparseCall& call);
void sparse_bitmap_cuda(const SparseCall& call);
/// Rows first ... first + dense.size(0) - 1 of the matrix; `first` is a multiple of a group's rows. Every
/// element of dense [rows, in] is written. Not for dense_columns.
void decompress_cuda(const Tensor& dense, const SparseWeight& weight, int64_t first);
/// y = x where it counts, else 0; both [T, in].
void apply_gate_cuda(const Tensor& y, const Tensor& x, const Gate& gate);
/// The inputs that count, for Gate::Kind::top_k: bit j % 32 of word [t, j / 32], i32 [T, ceil(in / 32)],
/// packed.
Tensor gate_bits_cuda(const Tensor& x, const Gate& gate);

/// Names of the variants on CUDA.
std::vector<std::string> sparse_linear_variants();

/// The format's kernels take at most so many tokens.
inline constexpr int64_t kColumnTokens = 8, kBitmapTokens = 32;

}  // namespace tessera::ops
