#pragma once

#include <initializer_list>
#include <string>
#include <string_view>
#include <vector>

#include "ops/attention/attention_kernels.h"

/// Which kernels compute attention on a GPU. Every row computes the same function by the same rounding
/// points; they differ in what they can take:
///   mma    mma.sync and cp.async: any GPU, and f32 in plain multiply-adds
///   wgmma  wgmma and TMA: compute capability 9.0, bf16 and f16, layouts that tensor maps encode

namespace tessera::ops {

enum class AttentionRow : uint8_t { mma, wgmma };

/// In the order of AttentionRow.
std::vector<std::string> attention_row_names();

/// The row of a problem: one that is forced, then the table of the GPU (operator "attention", key such as
/// "forward bf16 [1, 11000, 8, 64] x 10000 of 2 causal in 7", with 2 key heads and 7 sequences; "dropout"
/// follows "causal"), then mma where that is faster (few queries, many short sequences), then wgmma wherever
/// it can. `pass` is "forward" or "backward"; `heads` are all [B, L, H, D] operands of it, q first and k
/// second. Throws for a forced row that does not exist.
AttentionRow attention_row(std::string_view pass, std::initializer_list<Tensor> heads,
                           const AttentionProblem& problem);

/// Why the wgmma kernels cannot take these [B, L, H, D] operands, as the end of "row wgmma needs ..."; empty
/// if they can. Undefined tensors, which are not wanted, count as fitting.
std::string wgmma_needs(std::initializer_list<Tensor> heads);
/// Throws what wgmma_needs says.
void check_wgmma(std::initializer_list<Tensor> heads);

// The rows. Contracts as in attention_kernels.h.
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

/// Variant mma in bf16 and f16, forward where at most 16 queries read a key head: the kernels of
/// decode_attention, which cut the keys into as many pieces as fill the GPU.
bool attention_is_decoding(const Tensor& q, const Tensor& k, const AttentionProblem& problem);

/// Variant mma in bf16 and f16, forward of short lengths, or of at least three sequences that are short on
/// average: at most 64 queries (48 of one length), 16 tiles of 16 queries and 16 keys (5 above D = 64), and
/// no problem that decode_attention's kernels do faster. A warp has 16 queries of a head.
bool attention_is_many_short(const Tensor& q, const Tensor& k, const AttentionProblem& problem);
void attention_forward_many_cuda(const Tensor& o, const Tensor& lse, const Tensor& q, const Tensor& k,
                                 const Tensor& v, const AttentionProblem& problem);

/// Variant mma in bf16 and f16, backward where the queries that read one key head are few: at most 64
/// rows, with sequences (at most 511) even if one had all of them. With dropout heads count in whole blocks
/// of 16 queries.
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
