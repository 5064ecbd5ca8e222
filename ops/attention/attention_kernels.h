#pragma once

#include "ops/attention/attention.h"
#include "ops/attention/attention_dropout.h"
#include "runtime/f32_math.h"

namespace tessera::ops {

/// A [B, L, H, D] tensor whose heads are rows of D adjacent elements.
template <class T>
struct HeadRows {
  T* data;
  int64_t batch, row, head;  // strides in elements

  TESSERA_HD T* at(int64_t b, int64_t h) const { return data + b * batch + h * head; }
  TESSERA_HD T* at(int64_t b, int64_t h, int64_t i) const { return at(b, h) + i * row; }
};

template <class T>
HeadRows<T> head_rows(const Tensor& x) {
  const Layout& layout = x.layout();
  return {x.data<T>(), layout.stride(0), layout.stride(1), layout.stride(2)};
}
template <class T>
HeadRows<const T> const_head_rows(const Tensor& x) {
  const Layout& layout = x.layout();
  return {x.data<T>(), layout.stride(0), layout.stride(1), layout.stride(2)};
}

/// A bias [B, H, Lq, Lk], strides in elements: 0 where it broadcasts.
template <class T>
struct BiasRows {
  const T* data = nullptr;  // null: no bias
  int64_t batch = 0, head = 0, query = 0;
  int key = 0;  // 1, or 0: one value for all keys

  TESSERA_HD const T* row(int64_t b, int64_t h, int64_t i) const {
    return data + b * batch + h * head + i * query;
  }
};
template <class T>
BiasRows<T> bias_rows(const Tensor& bias) {
  if (!bias.defined()) return {};
  const Layout& layout = bias.layout();
  return {bias.data<T>(), layout.stride(0), layout.stride(1), layout.stride(2), int(layout.stride(3))};
}

/// What attention computes, in addition to its operands; `scale` has its default filled in, and `bias` is
/// undefined or expanded to [B, H, Lq, Lk], its keys with stride 1, or 0 if all have the same. With
/// cu_seqlens (both or neither) there is one batch, and sequences as in AttentionSequences.
struct AttentionProblem : AttentionOptions {
  Tensor cu_seqlens_q, cu_seqlens_k;
  AttentionDropout drop = {};    // from `dropout` and `rng`
  F32Math math = F32Math::ieee;  // of f32 operands
  int64_t first_query = 0;       // of `drop`: the row of the sequence's first query
  Tensor dbias = {};  // backward: the gradient of the bias, four dimensions, 1 where it broadcasts;
                      // undefined: not wanted

  bool packed() const { return cu_seqlens_q.defined(); }
  /// The same problem for the single sequence whose queries start there.
  AttentionProblem of_one(int64_t start) const {
    return {AttentionOptions(*this), {}, {}, drop, math, start};
  }
};

/// Number of keys, from key 0 on, that query i sees.
TESSERA_HD int64_t visible_keys(int64_t i, int64_t queries, int64_t keys, bool causal) {
  if (!causal) return keys;
  const int64_t seen = i + 1 + keys - queries;
  return seen < 0 ? 0 : (seen < keys ? seen : keys);
}

/// Factor of dq and dk, without dropout's. With a single key P is constant and dS the difference of equal
/// sums: the factor is 0, so that they are exactly 0.
inline double gradient_scale(double scale, int64_t keys) {
  return keys == 1 ? 0.0 : scale;
}

/// Kernels: q [B, Lq, H, D], k and v [B, Lk, Hk, D]; o, lse, dq, dk and dv are written whole.
void attention_forward_cpu(const Tensor& o, const Tensor& lse, const Tensor& q, const Tensor& k,
                           const Tensor& v, const AttentionProblem& problem);
/// dq may be undefined, and dk and dv together: not wanted. problem.dbias is written whole, too.
void attention_backward_cpu(const Tensor& dq, const Tensor& dk, const Tensor& dv, const Tensor& dout,
                            const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& o,
                            const Tensor& lse, const AttentionProblem& problem);

/// As an operand of the CPU's GEMMs: widened to the arithmetic type, or rounded to TF32.
Tensor attention_operand(const Tensor& x, F32Math math);
/// The bias widened to the arithmetic type, before it is expanded; undefined if there is none.
Tensor attention_bias(const Tensor& bias);
/// Where backward on the CPU leaves dS of every pair that a query sees, in the arithmetic type, for
/// write_dbias: zeros [B, H, Lq, Lk]; undefined if the bias needs no gradient.
Tensor attention_dscores(const AttentionProblem& problem, const Tensor& q, const Tensor& k);
/// problem.dbias = dS, or partial sums of it [pieces, ...], summed over what broadcasts and rounded.
void write_dbias(const AttentionProblem& problem, const Tensor& dscores);
/// The same for large problems of one length, f64 excepted: GEMMs of row tiles in BLAS.
bool attention_prefers_blas(const Tensor& q, const Tensor& k);
void attention_forward_blas(const Tensor& o, const Tensor& lse, const Tensor& q, const Tensor& k,
                            const Tensor& v, const AttentionProblem& problem);
void attention_backward_blas(const Tensor& dq, const Tensor& dk, const Tensor& dv, const Tensor& dout,
                             const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& o,
                             const Tensor& lse, const AttentionProblem& problem);

/// Heads are 16-byte aligned and D is a multiple of 8 up to 128.
void attention_forward_cuda(const Tensor& o, const Tensor& lse, const Tensor& q, const Tensor& k,
                            const Tensor& v, const AttentionProblem& problem);
void attention_backward_cuda(const Tensor& dq, const Tensor& dk, const Tensor& dv, const Tensor& dout,
                             const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& o,
                             const Tensor& lse, const AttentionProblem& problem);

}  // namespace tessera::ops
