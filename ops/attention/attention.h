#pragma once

#include <optional>

#include "runtime/rng.h"
#include "tensor/tensor.h"

namespace tessera::ops {

struct AttentionOptions {
  bool causal = false;
  double scale = 0;    // factor of the scores, positive; 0 means 1 / sqrt(D)
  double dropout = 0;  // dropout rate of the probabilities, 0 <= p < 1, rounded to applied_dropout(p)
  std::optional<Rng> rng = {};  // for dropout: reserves one stream per call
  Tensor bias = {};             // added to the scaled scores: masks, ALiBi, relative positions; see attention
};

struct AttentionResult {
  Tensor o;    // as q
  Tensor lse;  // [B, H, Lq], f32 (f64 for f64): log of the sum of exp of a query's scaled scores; no gradient
};

/// Packed sequences of any lengths (`starts` is cu_seqlens): sequence s of S is rows starts[s] ... starts[s +
/// 1] - 1. The tensors are i32 or i64 [S + 1], packed, on the device of q: starts[0] = 0, never falling
/// (equal neighbours: an empty sequence), the last at most the number of rows; rows from there on belong to
/// no sequence.
struct AttentionSequences {
  Tensor cu_seqlens_q;
  Tensor cu_seqlens_k = {};  // undefined: the same as cu_seqlens_q
};

/// Scaled dot-product attention (Vaswani et al., arXiv:1706.03762, section 3.2.1), of every batch and head:
///   S = scale Q K^T,  P = softmax(S) over the keys,  O = P V
/// q [B, Lq, H, D], k and v [B, Lk, Hk, D] -> o [B, Lq, H, D]. The two lengths are independent. H is a
/// multiple of Hk: query head h reads key head h Hk / H (Ainslie et al., arXiv:2305.13245), and dk and dv are
/// summed over the query heads that do in f32, before they are rounded.
///
/// `causal`: query i sees the keys j <= i + (Lk - Lq), so the last query sees all (PyTorch's lower-right
/// alignment); otherwise every query sees every key. A query that sees no key (Lk = 0, or i < Lq - Lk under
/// `causal`), or whose scores are all -inf, gives o = 0 and lse = -inf, and its gradient is 0. Keys hidden by
/// `causal` must be finite all the same: a kernel may multiply them by 0.
///
/// `bias`: S = scale Q K^T + bias, of q's dtype and any strides, broadcast to [B, H, Lq, Lk]: each dimension
/// is that or 1, and leading ones may be missing. -inf hides a pair from each other (mask_bias makes such a
/// bias of a bool mask); a query whose scores are all -inf sees nothing, as above. On CUDA a finite value
/// below -2.3e38 counts as -inf, too. A bias that is on the tape gets its gradient: dS, summed over the
/// dimensions that broadcast in f32 (f64 for f64), in a fixed order, and rounded once; it is exactly 0 for
/// one value for all keys. Keys hidden by the bias must be finite. Not with packed sequences.
///
/// `dropout`: O = (Z P) V / (1 - p) with a mask Z that is 0 with chance p, else 1 (Srivastava et al., JMLR
/// 15, 2014), after the softmax: lse is of all probabilities. p is rounded to a multiple of 1/256
/// (applied_dropout), and the rounded p is what 1 - p is computed from; 0 draws nothing. A NaN stays visible:
/// a query whose scores contain a NaN has o = NaN, and a NaN in v gives NaN to every query that sees its key,
/// whether the probability is dropped or not. Z is a function of the stream that `rng` reserves, of the batch
/// (or the start of the sequence), the head, and the positions of query and key in the sequence, so it is the
/// same on every device, in every variant and dtype; see AttentionDropout. Sequences of one length drop the
/// same as a batch. Backward recomputes Z, dS = P (Z dP / (1 - p) - delta); every replay of a graph draws a
/// new one, as eager calls do.
///
/// Layout: any strides of B, L and H are read in place if the elements of a head are adjacent (on CUDA also
/// 16-byte aligned); other views are copied first. o, dq, dk and dv are allocated in the memory order of q,
/// q, k and v: if q is a transposed view of [L, B, H, D] memory, the transposed o is plain rows of H * D.
///
/// dtypes: CPU f64 f32 bf16 f16 with D = 1 ... 256; CUDA f32 bf16 f16 with D = 1 ... 128. On CUDA a D that is
/// not a multiple of 8 is padded with zeros in copies of q, k, v and dout; o and the gradients are copied
/// back. Rounding (bf16, f16; sums in f32): forward P, before it is divided by its sum, to the dtype in P V
/// (the sum itself is of the unrounded); o. Backward P and dS = P (dP - delta) to the dtype in the products
/// that make dq, dk and dv, with dP = dO V^T and delta = rowsum(O dO) from the rounded o; dq, dk, dv. With
/// dropout P stands for Z P and dS for (1 - p) dS there: 1 / (1 - p) is a factor of results. f32 and f64
/// round as they compute. With one key the softmax is constant: dq and dk are then exactly 0.
///
/// Saved: q, k, v, o, lse and the bias, which is read in place (on CUDA if its keys are adjacent, an even
/// number of them, and its rows start on 16 bytes), else copied. Backward computes S again (Dao,
/// FlashAttention-2, arXiv:2307.08691, section 3.1). The gradient of the bias takes [B, H, Lq, Lk] in f32 on
/// the CPU, on CUDA up to 7 MiB or [B, H, Lk] in f32. Deterministic: fixed orders of summation, no atomics.
///
/// Throws if ranks, sizes, dtypes or devices do not match, for a scale that is negative or not finite, for a
/// dropout outside [0, 1), below 1/512 but not 0, or without `rng`, and for a D or dtype that the device does
/// not support.
Tensor attention(const Tensor& q, const Tensor& k, const Tensor& v, const AttentionOptions& options = {},
                 Site site = Site::here());

/// The bias of a bool mask of any shape: 0 where it is true, -inf where it is false, so that a query sees the
/// keys for which the mask is true. One call serves all layers that share a mask:
///   attention(q, k, v, {.bias = mask_bias(mask, q.dtype())})
Tensor mask_bias(const Tensor& mask, DType dtype, Site site = Site::here());

/// The chance that attention applies for options.dropout = p: p rounded to the nearest multiple of 1/256, at
/// most 255/256 (a mask of eight random bits per probability; 0.1 becomes 26/256 = 0.1016). Throws for p
/// outside [0, 1), and for p below 1/512 other than 0, which would become 0 and drop nothing.
double applied_dropout(double p);

/// The same, with the log-sum-exp that forward keeps anyway.
AttentionResult attention_with_lse(const Tensor& q, const Tensor& k, const Tensor& v,
                                   const AttentionOptions& options = {}, Site site = Site::here());

/// The same within each sequence: q [N, H, D], k and v [M, Hk, D] -> o [N, H, D], lse [H, N]. The lengths are
/// those of the sequence wherever the above speaks of Lq and Lk (`causal`, one key). Rows of no sequence give
/// o = 0, lse = -inf and gradients 0; q, k, v and dout must be finite there, as everywhere: a kernel may
/// multiply the rows after a sequence by 0.
///
/// On CUDA no launch depends on the values of `starts`, only on S, N and M: a captured graph may be replayed
/// so nothing can check them there: values that break the rules give wrong results, but never an access out
/// of bounds. On the CPU they throw.
Tensor attention(const Tensor& q, const Tensor& k, const Tensor& v, const AttentionSequences& sequences,
                 const AttentionOptions& options = {}, Site site = Site::here());
AttentionResult attention_with_lse(const Tensor& q, const Tensor& k, const Tensor& v,
                                   const AttentionSequences& sequences, const AttentionOptions& options = {},
                                   Site site = Site::here());

}  // namespace tessera::ops
