#pragma once

#include <span>
#include <string>
#include <vector>

#include "ops/sparse_linear/sparse_weight.h"
#include "tensor/tensor.h"

namespace tessera::ops {

/// Weights and cache of one decoder layer with d features, H query heads and Hk key heads of D elements, and
/// F hidden features. All of one floating dtype.
template <class Weight>
struct DecoderLayerOf {
  Tensor norm1;                     // [d]
  Weight qkv;                       // [(H + 2 Hk) D, d]: query heads, key heads, value heads
  Tensor qkv_bias = {};             // [(H + 2 Hk) D] (Qwen2), or undefined
  Tensor q_norm = {}, k_norm = {};  // [D], RMSNorm of each head of q and of k (Qwen3), or both undefined
  Weight out;                       // [d, H D]
  Tensor norm2;                     // [d]
  Weight up;                        // [2 F, d]: gate rows, then up rows
  Weight down;                      // [d, F]
  Tensor keys;                      // [1, capacity, Hk, D], written in place
  Tensor values;                    // likewise
};
using DecoderLayer = DecoderLayerOf<Tensor>;
/// With compressed weights, each in parts: its rows, from the top. `up` has two of F rows, gate and up.
using SparseDecoderLayer = DecoderLayerOf<std::vector<SparseWeight>>;

/// One new token through consecutive LLaMA layers (Touvron et al., arXiv:2302.13971), as a step of
/// generation needs it:
///   x = x + out attention(rope(qkv rmsnorm(x; norm1, eps) + qkv_bias), cache)
///   x = x + down (silu(gate h) (up h)),  h = rmsnorm(x; norm2, eps)
/// with q and k normalised by head, rmsnorm(q; q_norm, eps) and rmsnorm(k; k_norm, eps), ahead of rope.
///   x        [1, d]
///   table    [P, R]: cosines and sines of ops::rope_table, f32 (f64 for f64); R even, R <= D
///   lengths  [1], i32 or i64, on the device of x: tokens in the cache, the new one included
///   -> y     [1, d]
/// The key and the value of the new token go to row lengths[0] - 1 of every layer's cache; rows from
/// lengths[0] on are not read. The length is read on the device: one captured graph serves all steps.
///
/// Variants: "composed" runs the operators one after the other, with their rounding,
/// on any device and in any floating dtype. "persistent" is one CUDA kernel for all layers, for bf16 and f16
/// on sm_90: it is bound by reading each weight once, and is chosen where it can run
/// (`persistent_lacks`). There the residual stream and the sums of all GEMVs stay f32; what enters a GEMV,
/// and q, k and v, are rounded to the dtype once. Compressed weights must be sell_delta4 for it, of
/// which it reads 2.5 bytes per stored element; "composed" runs ops::sparse_linear in any format.
///
/// A length outside 1 ... min(capacity, P) throws on the CPU; on CUDA y is NaN and no cache is written.
/// Inference only: throws if a gradient would be needed. Deterministic.
Tensor decoder_layers(const Tensor& x, std::span<const DecoderLayer> layers, const Tensor& table,
                      const Tensor& lengths, double eps, Site site = Site::here());
Tensor decoder_layers(const Tensor& x, std::span<const SparseDecoderLayer> layers, const Tensor& table,
                      const Tensor& lengths, double eps, Site site = Site::here());

/// What the variant "persistent" needs and these layers lack, or an empty string.
std::string persistent_lacks(std::span<const DecoderLayer> layers, const Tensor& table);
std::string persistent_lacks(std::span<const SparseDecoderLayer> layers, const Tensor& table);

}  // namespace tessera::ops
