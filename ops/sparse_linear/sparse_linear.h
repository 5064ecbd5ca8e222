#pragma once

#include <span>

#include "ops/sparse_linear/gate.h"
#include "ops/sparse_linear/sparse_weight.h"

namespace tessera::ops {

/// Rows of a layer's weight, compressed, with the gate of their inputs: q, k and v read the same x, each with
/// a gate of its own.
struct SparsePart {
  SparseWeight weight;
  Gate gate = {};

  void fields(auto&& visit) { visit("weight", weight), visit("gate", gate); }
  bool operator==(const SparsePart&) const = default;
};

/// y = (gate(x) weight^T) + bias + residual with compressed weights, part by part: x [..., in], parts of
/// [out_i, in], bias [sum of out_i] or undefined, residual [..., sum of out_i] or undefined -> y.
///
/// Dtypes: a weight's is x's; on the CPU x may also be f32 or f64 next to weights of 16 bits, whose elements
/// are exact in it. bias and residual have x's. Rounding: sums in f32 (f64 for f64), the bias and then the
/// residual added to them, rounded once to x's dtype. The order of the sums is fixed; on the CPU it is that
/// of the inputs, and equal bits come from every format of the same matrix.
///
/// Inputs that the gate leaves out are not multiplied, and in formats by columns not read; where tokens of
/// one call have different gates, those of another token are multiplied with 0, so weights must be finite.
///
/// On a GPU (sm_90, bf16 and f16) the variants are
///   columns   dense_columns, up to 8 tokens: reads the columns that count for one of the tokens
///   tiles     tiled_cbc, up to 8 tokens: the same, and of those the elements that are stored
///   bitmap    tca_bme, up to 32 tokens: reads every stored element once
///   sell      sell_delta4, up to 8 tokens: the same
///   columns_joint, sell_joint   as columns and sell, with all parts of a call in one launch, and weights
///             asked for before the kernels ahead have ended (SparseWeight::constant): what is chosen
///   sell_wgmma  sell_delta4, up to 128 tokens: decompresses into shared memory and multiplies with tensor
///             cores, all parts of a call together; chosen from 5 tokens on
///   mma       mma_delta4, up to 64 tokens: the same, each warp on its own
///   gemm      any format and number of tokens: applies the gate, then multiplies with dense rows, which are
///             decompressed into scratch memory chunk by chunk (dense_columns: as they are, in any dtype
///             and on any GPU)
///
/// There is no backward pass: throws while a tape is recording. Throws where sizes, dtypes or devices
/// disagree, or if there are no parts.
Tensor sparse_linear(const Tensor& x, std::span<const SparsePart> parts, const Tensor& bias = {},
                     const Tensor& residual = {}, Site site = Site::here());
/// The same with one part.
Tensor sparse_linear(const Tensor& x, const SparseWeight& weight, const Gate& gate = {},
                     const Tensor& bias = {}, const Tensor& residual = {}, Site site = Site::here());

/// y = silu(gate_rows(x)) up_rows(x), where each is gate(x) W^T of its part: the first half of LLaMA's
/// feed-forward layer (linear_swiglu) with compressed weights. x [..., in], parts of [F, in] each -> y [...,
/// F].
///
/// The same as swiglu(sparse_linear(x, {gate, up})), and that is what it runs (variant "parts"), with its
/// rounding of gate and up to x's dtype; on a GPU variants "columns_joint" and "sell_joint" do both in one
/// launch for up to 8 tokens (columns: 4), and "sell_wgmma" and "mma" for more: gate and up then stay f32 and
/// y alone is rounded. They are what is chosen, sell_joint up to 4 tokens. Throws what those two throw, and
/// unless both parts have as many outputs.
Tensor sparse_linear_swiglu(const Tensor& x, const SparsePart& gate, const SparsePart& up,
                            Site site = Site::here());

/// The most tokens of a call for which a format's own kernel runs ("columns", "tiles": 8, "bitmap": 32,
/// "mma": 64, "sell_wgmma": 128); with more of them a GPU decompresses ("gemm").
int64_t most_sparse_tokens(SparseFormat format);

/// Why calls of so many tokens do not run the format's own kernel on the weight's device ("at most 8
/// tokens"); empty if they do. On the CPU the limit of tokens is the same, though its loops have none: what
/// runs there runs on a GPU.
std::string sparse_kernel_lacks(const SparseWeight& weight, int64_t tokens);

/// What runs such a call: "cpu", or a variant above. Throws if none can.
std::string sparse_linear_variant(const SparseWeight& weight, int64_t tokens);

}  // namespace tessera::ops
