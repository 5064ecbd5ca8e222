#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "ops/attention/attention_kernels.h"
#include "ops/lane_sum_internal.h"
#include "ops/reduce/reduce.h"
#include "runtime/parallel.h"
#include "tensor/precision.h"

/// The specification: every score of one query at a time, a stable softmax, rounded where the CUDA kernels
/// round. The double instance is the oracle. bf16 and f16 operands are widened to f32 once, which is exact;
/// in TF32 operands of GEMMs are rounded once.

namespace tessera::ops {
namespace {

template <class C>
C dot(const C* a, const C* b, int64_t n) {
  return lane_sum<C>(n, [=](int64_t i) { return a[i] * b[i]; });
}

/// acc += factor x
template <class C>
void add_scaled(C* acc, C factor, const C* x, int64_t n) {
  for (int64_t i = 0; i < n; ++i) acc[i] += factor * x[i];
}

/// As an operand of a GEMM in T: where the CUDA kernels round probabilities and dS.
template <class T, bool kTf32, class C>
C rounded(C value) {
  if constexpr (kTf32) return round_to_tf32(value);
  return C(T(value));
}

template <class C>
C bias_of(const BiasRows<C>& bias, int64_t b, int64_t h, int64_t i, int64_t j) {
  return bias.data ? bias.row(b, h, i)[j * bias.key] : C(0);
}

template <class T, bool kTf32>
void forward(const Tensor& o_, const Tensor& lse_, const Tensor& q_, const Tensor& k_, const Tensor& v_,
             const AttentionProblem& problem) {
  using C = Compute<T>;
  const int64_t batch = q_.size(0), queries = q_.size(1), heads = q_.size(2), dim = q_.size(3),
                keys = k_.size(1), group = heads / k_.size(2);
  const Tensor wide[] = {attention_operand(q_, problem.math), attention_operand(k_, problem.math),
                         attention_operand(v_, problem.math)};
  const auto q = const_head_rows<C>(wide[0]), k = const_head_rows<C>(wide[1]),
             v = const_head_rows<C>(wide[2]);
  const auto o = head_rows<T>(o_);
  C* const lse = lse_.data<C>();
  const int64_t lse_stride = lse_.layout().stride(1);
  const Tensor wide_bias = attention_bias(problem.bias);
  const auto bias = bias_rows<C>(wide_bias);
  const C scale = C(problem.scale), rescale = 1 / C(problem.drop.keep),
          lowest = -std::numeric_limits<C>::infinity();

  const int64_t grain = std::max<int64_t>(1, 65536 / std::max<int64_t>(1, keys * dim));
  parallel_for(batch * heads * queries, grain, [&](int64_t begin, int64_t end) {
    std::vector<C> p(static_cast<size_t>(keys)), acc(static_cast<size_t>(dim));
    std::vector<uint8_t> dropped(static_cast<size_t>(keys), 0);
    for (int64_t row = begin; row < end; ++row) {
      const int64_t head = row / queries, i = row % queries, b = head / heads, h = head % heads,
                    kv = h / group;
      const int64_t seen = visible_keys(i, queries, keys, problem.causal);
      C top = lowest;
      for (int64_t j = 0; j < seen; ++j) {
        p[size_t(j)] = scale * dot(q.at(b, h, i), k.at(b, kv, j), dim) + bias_of(bias, b, h, i, j);
        top = p[size_t(j)] > top ? p[size_t(j)] : top;
      }
      const C base = top == lowest ? C(0) : top;
      if (problem.drop.drops())
        problem.drop.row(drop_head_row(uint32_t(b), queries, problem.first_query, heads, uint32_t(h)), i,
                         seen, dropped.data());
      C sum = 0;
      acc.assign(acc.size(), C(0));
      for (int64_t j = 0; j < seen; ++j) {
        const C weight = std::exp(p[size_t(j)] - base);
        sum += weight;
        const C kept = dropped[size_t(j)] ? C(0) : C(1);  // a factor: a NaN stays one
        add_scaled(acc.data(), rounded<T, kTf32>(weight) * kept, v.at(b, kv, j), dim);
      }
      const C inverse = sum == 0 ? C(0) : rescale / sum;
      T* const out = o.at(b, h, i);
      for (int64_t d = 0; d < dim; ++d) out[d] = T(acc[size_t(d)] * inverse);
      lse[head * lse_stride + i] = sum == 0 ? lowest : base + std::log(sum);
    }
  });
}

template <class T, bool kTf32>
void backward(const Tensor& dq_, const Tensor& dk_, const Tensor& dv_, const Tensor& dout_, const Tensor& q_,
              const Tensor& k_, const Tensor& v_, const Tensor& o_, const Tensor& lse_,
              const AttentionProblem& problem) {
  using C = Compute<T>;
  const int64_t batch = q_.size(0), queries = q_.size(1), heads = q_.size(2), dim = q_.size(3),
                keys = k_.size(1), kv_heads = k_.size(2), group = heads / kv_heads;
  // delta is a plain sum: of o and dout as they are.
  const Tensor wide[] = {attention_operand(q_, problem.math),
                         attention_operand(k_, problem.math),
                         attention_operand(v_, problem.math),
                         attention_operand(dout_, problem.math),
                         o_.to(dtype_of<C>),
                         dout_.to(dtype_of<C>)};
  const auto q = const_head_rows<C>(wide[0]), k = const_head_rows<C>(wide[1]),
             v = const_head_rows<C>(wide[2]), dout = const_head_rows<C>(wide[3]),
             o = const_head_rows<C>(wide[4]), plain_dout = const_head_rows<C>(wide[5]);
  const C* const lse = lse_.data<C>();
  const int64_t lse_stride = lse_.layout().stride(1);
  const Tensor wide_bias = attention_bias(problem.bias), dscores = attention_dscores(problem, q_, k_);
  const auto bias = bias_rows<C>(wide_bias);
  const C scale = C(problem.scale), keep = C(problem.drop.keep), rescale = 1 / keep,
          last = C(gradient_scale(problem.scale, keys)) * rescale;

  parallel_for(batch * kv_heads, 1, [&](int64_t begin, int64_t end) {
    std::vector<C> dk(size_t(keys * dim)), dv(size_t(keys * dim)), dq(static_cast<size_t>(dim));
    std::vector<uint8_t> dropped(static_cast<size_t>(keys), 0);
    for (int64_t kv_row = begin; kv_row < end; ++kv_row) {
      const int64_t b = kv_row / kv_heads, kv = kv_row % kv_heads;
      dk.assign(dk.size(), C(0));
      dv.assign(dv.size(), C(0));
      for (int64_t h = kv * group; h < (kv + 1) * group; ++h)
        for (int64_t i = 0; i < queries; ++i) {
          dq.assign(dq.size(), C(0));
          const C row_lse = lse[(b * heads + h) * lse_stride + i];
          const bool blind = row_lse == -std::numeric_limits<C>::infinity();
          const int64_t seen = blind ? 0 : visible_keys(i, queries, keys, problem.causal);
          const C delta = keep * dot(o.at(b, h, i), plain_dout.at(b, h, i), dim);
          if (problem.drop.drops())
            problem.drop.row(drop_head_row(uint32_t(b), queries, problem.first_query, heads, uint32_t(h)), i,
                             seen, dropped.data());
          for (int64_t j = 0; j < seen; ++j) {
            const C shift = bias_of(bias, b, h, i, j) - row_lse;
            const C p = std::exp(scale * dot(q.at(b, h, i), k.at(b, kv, j), dim) + shift);
            const C kept = dropped[size_t(j)] ? C(0) : C(1);
            const C dp = kept * dot(dout.at(b, h, i), v.at(b, kv, j), dim);
            const C exact = p * (dp - delta), ds = rounded<T, kTf32>(exact);
            if (dscores.defined())
              dscores.data<C>()[((b * heads + h) * queries + i) * dscores.row_stride() + j] = exact * rescale;
            add_scaled(&dv[size_t(j * dim)], rounded<T, kTf32>(p) * kept, dout.at(b, h, i), dim);
            add_scaled(&dk[size_t(j * dim)], ds, q.at(b, h, i), dim);
            add_scaled(dq.data(), ds, k.at(b, kv, j), dim);
          }
          if (!dq_.defined()) continue;
          T* const out = head_rows<T>(dq_).at(b, h, i);
          for (int64_t d = 0; d < dim; ++d) out[d] = T(dq[size_t(d)] * last);
        }
      if (!dk_.defined()) continue;
      for (int64_t j = 0; j < keys; ++j)
        for (int64_t d = 0; d < dim; ++d) {
          head_rows<T>(dk_).at(b, kv, j)[d] = T(dk[size_t(j * dim + d)] * last);
          head_rows<T>(dv_).at(b, kv, j)[d] = T(dv[size_t(j * dim + d)] * rescale);
        }
    }
  });
  write_dbias(problem, dscores);
}

/// Where the sequences start, checked, with the number of rows after them.
std::vector<int64_t> starts_of(const char* name, const Tensor& tensor, int64_t rows) {
  std::vector<int64_t> starts = tensor.to_vector<int64_t>();
  int64_t before = 0;
  for (size_t s = 0; s < starts.size(); ++s) {
    check(s > 0 ? starts[s] >= before : starts[s] == 0, "attention: ", name, "[", s, "] is ", starts[s],
          "; expected ", s > 0 ? "at least " : "", before);
    before = starts[s];
  }
  check(before <= rows, "attention: ", name, " ends at ", before, "; expected at most the ", rows,
        " rows that there are");
  starts.push_back(rows);
  return starts;
}

/// Calls f(rows of the queries, rows of the keys, the problem) for each sequence, the rows as functions that
/// cut them, of dimension `dim`, out of a tensor; at last for the rows of no sequence, whose queries see no
/// key.
template <class F>
void for_each_sequence(const Tensor& q, const Tensor& k, const AttentionProblem& problem, F&& f) {
  const auto cu_seqlens_q = starts_of("cu_seqlens_q", problem.cu_seqlens_q, q.size(1)),
             cu_seqlens_k = starts_of("cu_seqlens_k", problem.cu_seqlens_k, k.size(1));
  const auto cut = [](int64_t begin, int64_t end) {
    return [=](const Tensor& x, int dim = 1) { return x.defined() ? x.slice(dim, begin, end) : x; };
  };
  const size_t count = cu_seqlens_q.size() - 2;
  for (size_t s = 0; s < count; ++s)
    f(cut(cu_seqlens_q[s], cu_seqlens_q[s + 1]), cut(cu_seqlens_k[s], cu_seqlens_k[s + 1]),
      problem.of_one(cu_seqlens_q[s]));
  f(cut(cu_seqlens_q[count], q.size(1)), cut(0, 0), problem.of_one(0));
  f(cut(0, 0), cut(cu_seqlens_k[count], k.size(1)), problem.of_one(0));
}

}  // namespace

Tensor attention_operand(const Tensor& x, F32Math math) {
  if (math == F32Math::tf32) return rounded_to_tf32(x);
  return x.to(x.dtype() == DType::f64 ? DType::f64 : DType::f32);
}

Tensor attention_bias(const Tensor& bias) {
  if (!bias.defined()) return bias;
  Tensor own = bias;  // without what expand repeats
  for (int dim = 0; dim < 4; ++dim)
    if (bias.layout().stride(dim) == 0) own = own.slice(dim, 0, std::min<int64_t>(1, own.size(dim)));
  return attention_operand(own, F32Math::ieee).expand(bias.shape());
}

Tensor attention_dscores(const AttentionProblem& problem, const Tensor& q, const Tensor& k) {
  if (!problem.dbias.defined()) return {};
  return Tensor::zeros({q.size(0), q.size(2), q.size(1), k.size(1)},
                       q.dtype() == DType::f64 ? DType::f64 : DType::f32);
}

void write_dbias(const AttentionProblem& problem, const Tensor& dscores) {
  if (dscores.defined()) problem.dbias.copy_from(sum_to(dscores, problem.dbias.shape()));
}

void attention_forward_cpu(const Tensor& o, const Tensor& lse, const Tensor& q, const Tensor& k,
                           const Tensor& v, const AttentionProblem& problem) {
  if (problem.packed())
    return for_each_sequence(q, k, problem,
                             [&](const auto& rows, const auto& keys, const AttentionProblem& one) {
                               attention_forward_cpu(rows(o), rows(lse, 2), rows(q), keys(k), keys(v), one);
                             });
  if (attention_prefers_blas(q, k)) return attention_forward_blas(o, lse, q, k, v, problem);
  if (problem.math == F32Math::tf32) return forward<float, true>(o, lse, q, k, v, problem);
  dispatch_floating(q.dtype(), "attention", [&]<class T>() { forward<T, false>(o, lse, q, k, v, problem); });
}

void attention_backward_cpu(const Tensor& dq, const Tensor& dk, const Tensor& dv, const Tensor& dout,
                            const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& o,
                            const Tensor& lse, const AttentionProblem& problem) {
  if (problem.packed())
    return for_each_sequence(q, k, problem,
                             [&](const auto& rows, const auto& keys, const AttentionProblem& one) {
                               attention_backward_cpu(rows(dq), keys(dk), keys(dv), rows(dout), rows(q),
                                                      keys(k), keys(v), rows(o), rows(lse, 2), one);
                             });
  if (attention_prefers_blas(q, k))
    return attention_backward_blas(dq, dk, dv, dout, q, k, v, o, lse, problem);
  if (problem.math == F32Math::tf32) return backward<float, true>(dq, dk, dv, dout, q, k, v, o, lse, problem);
  dispatch_floating(q.dtype(), "attention",
                    [&]<class T>() { backward<T, false>(dq, dk, dv, dout, q, k, v, o, lse, problem); });
}

}  // namespace tessera::ops
