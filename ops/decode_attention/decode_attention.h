#pragma once

#include "tensor/tensor.h"

namespace tessera::ops {

struct DecodeAttentionOptions {
  double scale = 0;  // factor of the scores, positive; 0 means 1 / sqrt(D)
};

/// Attention of a few new tokens over a cache of keys and values, as generation needs it: scaled dot-product
/// attention (Vaswani et al., arXiv:1706.03762, section 3.2.1), causal, grouped queries (Ainslie et al.,
/// arXiv:2305.13245).
///   q        [B, n, H, D]          the n = 1 ... 16 newest tokens of every sequence
///   keys     [B, capacity, Hk, C]  H a multiple of Hk: query head h reads key head h Hk / H
///   values   [B, capacity, Hk, C]  C >= D: the elements of a head from D on are padding, finite, unused
///   lengths  [B]                   i32 or i64, on the device of q: tokens that each sequence holds, the n
///                                  new ones included
///   -> o     [B, n, H, D], heads side by side in rows of H D
/// Query i sees the keys j < lengths[b] - n + 1 + i, so the last one sees all of its sequence. Rows of the
/// cache from lengths[b] on are not read. Keys that a query does not see must be finite all the same where
/// another query of its sequence sees them.
///
/// The lengths are read by the kernel: nothing on the host depends on them, so one captured graph serves all
/// steps while they grow. n <= lengths[b] <= capacity must hold. The CPU throws where it does not; CUDA gives
/// NaN for that sequence and touches nothing out of bounds.
///
/// Any strides of the first three dimensions are read in place if the elements of a head are adjacent (on
/// CUDA also 16-byte aligned); other views are copied first. dtypes: CPU f64 f32 bf16 f16, CUDA f32 bf16 f16
/// (variant "mma": bf16 and f16 with C up to 128); D and C 1 ... 256. On CUDA a C that is not a multiple of 8
/// is padded with zeros in copies of both caches: allocate them with C = padded_head_dim
/// (attention/head_padding.h) and zeros, so that only q and o are copied. Rounding: scores and sums in f32
/// (f64); P, before it is divided by its sum, to the dtype in P V (not in variant "fma"); o once. A query
/// whose scores are all -inf gives 0.
///
/// Inference only: throws if a gradient would be needed. Deterministic: the keys are cut by length, capacity
/// and GPU alone, and the pieces are added in order.
Tensor decode_attention(const Tensor& q, const Tensor& keys, const Tensor& values, const Tensor& lengths,
                        const DecodeAttentionOptions& options = {}, Site site = Site::here());

/// Writes the new tokens x [B, n, Hk, D], n >= 1, to rows lengths[b] - n ... lengths[b] - 1 of cache
/// [B, capacity, Hk, D], in place. lengths [B], i32 or i64, as above: those of the sequences after the call.
/// A sequence with another length than n ... capacity is an error on the CPU; on CUDA nothing of it is
/// written. Any strides; one dtype and device. Throws if a gradient would be needed.
void append_to_cache(Tensor& cache, const Tensor& x, const Tensor& lengths, Site site = Site::here());

}  // namespace tessera::ops
