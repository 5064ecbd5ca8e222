#pragma once

#include "ops/sparse_linear/sparse_linear.h"
#include "ops/variant.h"

namespace tessera::ops {

/// The parts from the first on that a variant is chosen for, since one launch can take them: of one format,
/// at most sparse::kJointWeights of them not empty.
std::span<const SparsePart> parts_of_launch(std::span<const SparsePart> parts);
/// The variant that is chosen for them.
std::string sparse_linear_variant(std::span<const SparsePart> launch, int64_t tokens, const Gpu& gpu);

/// Parts of one launch (parts_of_launch), operands checked: x is [T, in]; y [T, out] and
/// residual [T, out], where `out` is the sum of the parts' outputs, may be columns of wider matrices.
/// Undefined: not given.
struct SparseCall {
  const Tensor& y;
  const Tensor& x;
  std::span<const SparsePart> parts;
  const Tensor& bias;
  const Tensor& residual;
};

/// One of them, with its columns of y, bias and residual.
struct SparsePartCall {
  Tensor y;
  const Tensor& x;
  const SparseWeight& weight;
  const Gate& gate;
  Tensor bias, residual;
};

/// Calls run(SparsePartCall) for each part, in order.
template <class Run>
void for_each_part(const SparseCall& call, Run&& run) {
  int64_t first = 0;
  for (const SparsePart& part : call.parts) {
    const int64_t end = first + part.weight.out;
    const auto columns = [&](const Tensor& rows) {
      return rows.defined() ? rows.slice(-1, first, end) : rows;
    };
    if (first < end)
      run(SparsePartCall{columns(call.y), call.x, part.weight, part.gate, columns(call.bias),
                         columns(call.residual)});
    first = end;
  }
}

void sparse_linear_cpu(const SparseCall& call);

/// The variants on CUDA (sparse_linear.h), part by part. What they need beyond their format and number of
/// tokens, `lacks` of the table in sparse_linear.cpp says.
void sparse_columns_cuda(const SparsePartCall& call);
void sparse_tiles_cuda(const SparsePartCall& call);
void sparse_bitmap_cuda(const SparsePartCall& call);
void sparse_sell_cuda(const SparsePartCall& call);
/// All parts in one launch (joint_plan.h).
void sparse_columns_joint_cuda(const SparseCall& call);
void sparse_sell_joint_cuda(const SparseCall& call);
void sparse_sell_wgmma_cuda(const SparseCall& call);
void sparse_mma_cuda(const SparseCall& call);
/// y [T, F] = silu(gate) up of two parts of F outputs, without bias and residual, in one launch. Rounded
/// once: gate and up stay f32.
void sparse_columns_swiglu_cuda(const SparseCall& call);
void sparse_sell_swiglu_cuda(const SparseCall& call);
void sparse_sell_wgmma_swiglu_cuda(const SparseCall& call);
void sparse_mma_swiglu_cuda(const SparseCall& call);
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
std::vector<std::string> sparse_linear_swiglu_variants();

/// The format's kernels take at most so many tokens.
inline constexpr int64_t kColumnTokens = 8, kBitmapTokens = 32, kSellTokens = 8;

}  // namespace tessera::ops
