#pragma once

#include <initializer_list>

#include "ops/attention/attention_kernels.h"
#include "ops/variant.h"

/// Kernels that compute attention on a GPU. All variants compute the same function with the same rounding
/// points; they differ in the problems that they support:
///   mma    mma.sync and cp.async: any GPU, and f32 in plain multiply-adds
///   wgmma  wgmma and TMA: compute capability 9.0, bf16 and f16, layouts that tensor maps encode, no bias
/// A problem runs on mma where that was measured to be faster (few queries, many short sequences:
/// docs/ops/attention_shapes.md), else on wgmma wherever that can run.

namespace tessera::ops {

std::vector<std::string> attention_variants();

/// The name of the choice. `heads` are all [B, L, H, D] operands of the pass, q first and k second; those
/// that are undefined are not wanted.
std::string_view attention_variant(bool forward, std::initializer_list<const Tensor*> heads,
                                   const AttentionProblem& problem, const Gpu& gpu);

// The variants. Contracts as in attention_kernels.h.
void attention_forward_mma_cuda(const Tensor& o, const Tensor& lse, const Tensor& q, const Tensor& k,
                                const Tensor& v, const AttentionProblem& problem);
void attention_forward_wgmma_cuda(const Tensor& o, const Tensor& lse, const Tensor& q, const Tensor& k,
                                  const Tensor& v, const AttentionProblem& problem);
void attention_backward_mma_cuda(const Tensor& dq, const Tensor& dk, const Tensor& dv, const Tensor& dout,
                                 const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& o,
                                 const Tensor& lse, const AttentionProblem& problem);
void attention_backward_wgmma_cuda(const Tensor& dq, const Tensor& dk, const Tensor& dv, const Tensor& dout,
                                   const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& o,
                                   const Tensor& lse, const AttentionProblem& problem);

/// Variant mma in bf16 and f16, forward, for at most 16 queries per key head: the kernels of
/// decode_attention, which split the keys until the GPU is full (split-KV).
bool attention_is_decoding(const Tensor& q, const Tensor& k, const AttentionProblem& problem);

/// Variant mma in bf16 and f16, forward of short lengths, or of at least three sequences that are short on
/// average: at most 64 queries (48 of one length), 16 tiles of 16 queries and 16 keys (5 above D = 64), and
/// no problem that decode_attention's kernels do faster. A warp has 16 queries of a head.
bool attention_is_many_short(const Tensor& q, const Tensor& k, const AttentionProblem& problem);
void attention_forward_many_cuda(const Tensor& o, const Tensor& lse, const Tensor& q, const Tensor& k,
                                 const Tensor& v, const AttentionProblem& problem);

/// Variant mma in bf16 and f16, backward, for few queries per key head: at most 64 rows; with packed
/// sequences at most 511 rows, even if one sequence had all of them. With dropout, heads count as whole
/// blocks of 16 queries.
bool attention_has_few_queries(const Tensor& q, const Tensor& k, const AttentionProblem& problem);
void attention_backward_few_cuda(const Tensor& dq, const Tensor& dk, const Tensor& dv, const Tensor& dout,
                                 const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& o,
                                 const Tensor& lse, const AttentionProblem& problem);

/// Variant wgmma, forward for up to kShortKeys keys.
inline constexpr int64_t kShortKeys = 128;
void attention_short_sm90(const Tensor& o, const Tensor& lse, const Tensor& q, const Tensor& k,
                          const Tensor& v, const AttentionProblem& problem);
/// Variant wgmma, backward for up to that many keys and heads of up to 64.
inline constexpr int64_t kShortBackwardKeys = 64;
void attention_backward_short_sm90(const Tensor& dq, const Tensor& dk, const Tensor& dv, const Tensor& dout,
                                   const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& o,
                                   const Tensor& lse, const AttentionProblem& problem);

}  // namespace tessera::ops
