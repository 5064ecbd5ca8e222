#include <cmath>
#include <limits>
#include <vector>

#include "ops/attention/attention_kernels.h"
#include "runtime/parallel.h"

/// The specification: every score of one query at a time, a stable softmax, rounded where the CUDA kernels
/// round. The double instance is the oracle. bf16 and f16 operands are widened to f32 once, which is exact.

namespace tessera::ops {
namespace {

template <class C>
C dot(const C* a, const C* b, int64_t n) {
  C sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < n; ++i) sum += a[i] * b[i];
  return sum;
}

/// acc += factor x
template <class C>
void add_scaled(C* acc, C factor, const C* x, int64_t n) {
  for (int64_t i = 0; i < n; ++i) acc[i] += factor * x[i];
}

template <class T, class C>
C rounded(C value) {
  return C(T(value));
}

template <class T>
void forward(const Tensor& o_, const Tensor& lse_, const Tensor& q_, const Tensor& k_, const Tensor& v_,
             const AttentionOptions& options) {
  using C = Compute<T>;
  const int64_t batch = q_.size(0), queries = q_.size(1), heads = q_.size(2), dim = q_.size(3),
                keys = k_.size(1);
  const Tensor wide[] = {q_.to(dtype_of<C>), k_.to(dtype_of<C>), v_.to(dtype_of<C>)};
  const auto q = const_head_rows<C>(wide[0]), k = const_head_rows<C>(wide[1]),
             v = const_head_rows<C>(wide[2]);
  const auto o = head_rows<T>(o_);
  C* const lse = lse_.data<C>();
  const int64_t lse_stride = lse_.row_stride();
  const C scale = C(options.scale), lowest = -std::numeric_limits<C>::infinity();

  const int64_t grain = std::max<int64_t>(1, 65536 / std::max<int64_t>(1, keys * dim));
  parallel_for(batch * heads * queries, grain, [&](int64_t begin, int64_t end) {
    std::vector<C> p(static_cast<size_t>(keys)), acc(static_cast<size_t>(dim));
    for (int64_t row = begin; row < end; ++row) {
      const int64_t head = row / queries, i = row % queries, b = head / heads, h = head % heads;
      const int64_t seen = visible_keys(i, queries, keys, options.causal);
      C top = lowest;
      for (int64_t j = 0; j < seen; ++j) {
        p[size_t(j)] = scale * dot(q.at(b, h, i), k.at(b, h, j), dim);
        top = p[size_t(j)] > top ? p[size_t(j)] : top;
      }
      const C base = top == lowest ? C(0) : top;
      C sum = 0;
      acc.assign(acc.size(), C(0));
      for (int64_t j = 0; j < seen; ++j) {
        const C weight = std::exp(p[size_t(j)] - base);
        sum += weight;
        add_scaled(acc.data(), rounded<T>(weight), v.at(b, h, j), dim);
      }
      const C inverse = sum == 0 ? C(0) : 1 / sum;
      T* const out = o.at(b, h, i);
      for (int64_t d = 0; d < dim; ++d) out[d] = T(acc[size_t(d)] * inverse);
      lse[head * lse_stride + i] = sum == 0 ? lowest : base + std::log(sum);
    }
  });
}

template <class T>
void backward(const Tensor& dq_, const Tensor& dk_, const Tensor& dv_, const Tensor& dout_, const Tensor& q_,
              const Tensor& k_, const Tensor& v_, const Tensor& o_, const Tensor& lse_,
              const AttentionOptions& options) {
  using C = Compute<T>;
  const int64_t batch = q_.size(0), queries = q_.size(1), heads = q_.size(2), dim = q_.size(3),
                keys = k_.size(1);
  const Tensor wide[] = {q_.to(dtype_of<C>), k_.to(dtype_of<C>), v_.to(dtype_of<C>), o_.to(dtype_of<C>),
                         dout_.to(dtype_of<C>)};
  const auto q = const_head_rows<C>(wide[0]), k = const_head_rows<C>(wide[1]),
             v = const_head_rows<C>(wide[2]), o = const_head_rows<C>(wide[3]),
             dout = const_head_rows<C>(wide[4]);
  const C* const lse = lse_.data<C>();
  const int64_t lse_stride = lse_.row_stride();
  const C scale = C(options.scale), last = C(gradient_scale(options.scale, keys));

  parallel_for(batch * heads, 1, [&](int64_t begin, int64_t end) {
    std::vector<C> dk(size_t(keys * dim)), dv(size_t(keys * dim)), dq(static_cast<size_t>(dim));
    for (int64_t head = begin; head < end; ++head) {
      const int64_t b = head / heads, h = head % heads;
      dk.assign(dk.size(), C(0));
      dv.assign(dv.size(), C(0));
      for (int64_t i = 0; i < queries; ++i) {
        dq.assign(dq.size(), C(0));
        const C row_lse = lse[head * lse_stride + i];
        const bool blind = row_lse == -std::numeric_limits<C>::infinity();
        const int64_t seen = blind ? 0 : visible_keys(i, queries, keys, options.causal);
        const C delta = dot(o.at(b, h, i), dout.at(b, h, i), dim);
        for (int64_t j = 0; j < seen; ++j) {
          const C p = std::exp(scale * dot(q.at(b, h, i), k.at(b, h, j), dim) - row_lse);
          const C dp = dot(dout.at(b, h, i), v.at(b, h, j), dim);
          const C ds = rounded<T>(p * (dp - delta));
          add_scaled(&dv[size_t(j * dim)], rounded<T>(p), dout.at(b, h, i), dim);
          add_scaled(&dk[size_t(j * dim)], ds, q.at(b, h, i), dim);
          add_scaled(dq.data(), ds, k.at(b, h, j), dim);
        }
        if (!dq_.defined()) continue;
        T* const out = head_rows<T>(dq_).at(b, h, i);
        for (int64_t d = 0; d < dim; ++d) out[d] = T(dq[size_t(d)] * last);
      }
      if (!dk_.defined()) continue;
      for (int64_t j = 0; j < keys; ++j)
        for (int64_t d = 0; d < dim; ++d) {
          head_rows<T>(dk_).at(b, h, j)[d] = T(dk[size_t(j * dim + d)] * last);
          head_rows<T>(dv_).at(b, h, j)[d] = T(dv[size_t(j * dim + d)]);
        }
    }
  });
}

}  // namespace

void attention_forward_cpu(const Tensor& o, const Tensor& lse, const Tensor& q, const Tensor& k,
                           const Tensor& v, const AttentionOptions& options) {
  if (attention_prefers_blas(q, k)) return attention_forward_blas(o, lse, q, k, v, options);
  dispatch_floating(q.dtype(), "attention", [&]<class T>() { forward<T>(o, lse, q, k, v, options); });
}

void attention_backward_cpu(const Tensor& dq, const Tensor& dk, const Tensor& dv, const Tensor& dout,
                            const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& o,
                            const Tensor& lse, const AttentionOptions& options) {
  if (attention_prefers_blas(q, k))
    return attention_backward_blas(dq, dk, dv, dout, q, k, v, o, lse, options);
  dispatch_floating(q.dtype(), "attention",
                    [&]<class T>() { backward<T>(dq, dk, dv, dout, q, k, v, o, lse, options); });
}

}  // namespace tessera::ops
