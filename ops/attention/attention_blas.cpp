#include <algorithm>
#include <climits>
#include <cmath>
#include <limits>
#include <memory>
#include <type_traits>
#include <vector>

#include "ops/attention/attention_kernels.h"
#include "ops/gemm/sgemm_internal.h"
#include "ops/lane_sum_internal.h"
#include "ops/vector_math_internal.h"
#include "runtime/integers.h"
#include "runtime/parallel.h"
#include "tensor/convert.h"
#include "tensor/precision.h"

/// All but f64 on the CPU: a tile of query rows at a time, its scores whole in cache (at most kTileScores of
/// them), so each of the two (forward) or five (backward) GEMMs is one sgemm and the softmax one pass over
/// rows. Operands of 16 bits are widened to f32 once; probabilities and dS are rounded as in
/// attention_cpu.cpp. Bound by the GEMMs and, at small D, by the exponentials, which vectorise.

namespace tessera::ops {
namespace {

constexpr int64_t kTileScores = int64_t{1} << 17;  // 512 KiB: half of a usual second-level cache

struct Sizes {
  int64_t batch, queries, heads, dim, keys, kv_heads, group, tile, tiles;
};

Sizes sizes_of(const Tensor& q, const Tensor& k) {
  Sizes n{q.size(0), q.size(1), q.size(2), q.size(3), k.size(1), k.size(2), q.size(2) / k.size(2), 0, 0};
  n.tile = std::clamp<int64_t>(kTileScores / n.keys, 8, 128);
  n.tiles = ceil_div(n.queries, n.tile);
  return n;
}

/// c [m, n] = a [m, k] b [n, k]^T
void gemm_nt(int64_t m, int64_t n, int64_t k, const float* a, int64_t lda, const float* b, int64_t ldb,
             float* c, int64_t ldc) {
  sgemm(m, n, k, 1, {a, lda}, {b, ldb, true}, 0, c, ldc);
}
/// c [m, n] = factor a [m, k] b [k, n]
void gemm_nn(int64_t m, int64_t n, int64_t k, float factor, const float* a, int64_t lda, const float* b,
             int64_t ldb, float* c, int64_t ldc) {
  sgemm(m, n, k, factor, {a, lda}, {b, ldb}, 0, c, ldc);
}
/// c [m, n] += factor a [k, m]^T b [k, n]
void add_gemm_tn(int64_t m, int64_t n, int64_t k, float factor, const float* a, int64_t lda, const float* b,
                 int64_t ldb, float* c, int64_t ldc) {
  sgemm(m, n, k, factor, {a, lda, true}, {b, ldb}, 1, c, ldc);
}

/// Keys that the last query of a tile sees; the others see no more.
int64_t keys_of_tile(const Sizes& n, int64_t end, bool causal) {
  return visible_keys(end - 1, n.queries, n.keys, causal);
}

/// Rounds n probabilities or elements of dS to what a GEMM of T, or of TF32, takes.
template <class T, bool kTf32>
void round_row([[maybe_unused]] float* row, [[maybe_unused]] int64_t n) {
  if constexpr (kTf32) {
    for (int64_t i = 0; i < n; ++i) row[i] = round_to_tf32(row[i]);
  } else if constexpr (!std::is_same_v<T, float>) {
    constexpr int64_t kBlock = 512;
    T block[kBlock];
    for (int64_t i = 0; i < n; i += kBlock) {
      const int64_t count = std::min(kBlock, n - i);
      narrow(block, row + i, count);
      widen(row + i, block, count);
    }
  }
}

/// 1 for what is kept, 0 for what is dropped: a factor, so that a NaN stays one.
void drop_row(float* row, const uint8_t* dropped, int64_t n) {
  for (int64_t j = 0; j < n; ++j) row[j] *= dropped[j] ? 0.0f : 1.0f;
}

/// f(the bias of key j as a function of j), of a function that vectorises.
template <class F>
void with_bias(const BiasRows<float>& bias, int64_t b, int64_t h, int64_t i, F&& f) {
  if (!bias.data) return f([](int64_t) { return 0.0f; });
  const float* const row = bias.row(b, h, i);
  if (bias.key == 0) return f([row](int64_t) { return *row; });
  f([row](int64_t j) { return row[j]; });
}

template <class T, bool kTf32>
void forward(const Tensor& o_, const Tensor& lse_, const Tensor& q_, const Tensor& k_, const Tensor& v_,
             const AttentionProblem& problem) {
  const Sizes n = sizes_of(q_, k_);
  const Tensor wide[] = {attention_operand(q_, problem.math), attention_operand(k_, problem.math),
                         attention_operand(v_, problem.math)};
  const auto q = const_head_rows<float>(wide[0]), k = const_head_rows<float>(wide[1]),
             v = const_head_rows<float>(wide[2]);
  const auto o = head_rows<T>(o_);
  const Tensor wide_bias = attention_bias(problem.bias);
  const auto bias = bias_rows<float>(wide_bias);
  float* const lse = lse_.data<float>();
  const int64_t lse_stride = lse_.layout().stride(1);
  const float scale = float(problem.scale), lowest = -std::numeric_limits<float>::infinity();
  const AttentionDropout& drop = problem.drop;

  parallel_for(n.batch * n.heads * n.tiles, 1, [&](int64_t begin, int64_t end) {
    const auto scores = std::make_unique_for_overwrite<float[]>(size_t(n.tile * n.keys)),
               product = std::make_unique_for_overwrite<float[]>(size_t(n.tile * n.dim));
    std::vector<float> inverse(size_t(n.tile), 0.0f);
    std::vector<uint8_t> dropped(size_t(n.keys), 0);
    for (int64_t piece = begin; piece < end; ++piece) {
      const int64_t head = piece / n.tiles, b = head / n.heads, h = head % n.heads, kv = h / n.group;
      const int64_t first = piece % n.tiles * n.tile, last = std::min(first + n.tile, n.queries);
      const int64_t keys = keys_of_tile(n, last, problem.causal);
      if (keys > 0)
        gemm_nt(last - first, keys, n.dim, q.at(b, h, first), q.row, k.at(b, kv), k.row, scores.get(), keys);
      for (int64_t i = first; i < last; ++i) {
        float* const p = &scores[size_t((i - first) * keys)];
        const int64_t seen = visible_keys(i, n.queries, n.keys, problem.causal);
        with_bias(bias, b, h, i, [&](const auto& bias_of) {
          for (int64_t j = 0; j < seen; ++j) p[j] = p[j] * scale + bias_of(j);
        });
        const float top = lane_max(p, seen);
        const float base = top == lowest ? 0.0f : top;
        for (int64_t j = 0; j < seen; ++j) p[j] = vector_exponential(p[j] - base);
        const float sum = lane_sum<float>(seen, [p](int64_t j) { return p[j]; });
        inverse[size_t(i - first)] = sum == 0 ? 0.0f : drop.scale / sum;
        lse[head * lse_stride + i] = sum == 0 ? lowest : base + std::log(sum);
        round_row<T, kTf32>(p, seen);
        if (drop.drops()) {
          drop.row(drop_head_row(uint32_t(b), n.queries, problem.first_query, n.heads, uint32_t(h)), i, seen,
                   dropped.data());
          drop_row(p, dropped.data(), seen);
        }
        std::fill(p + seen, p + keys, 0.0f);
      }
      if (keys > 0)
        gemm_nn(last - first, n.dim, keys, 1, scores.get(), keys, v.at(b, kv), v.row, product.get(), n.dim);
      else
        std::fill_n(product.get(), (last - first) * n.dim, 0.0f);
      for (int64_t i = first; i < last; ++i) {
        float* const row = &product[size_t((i - first) * n.dim)];
        for (int64_t d = 0; d < n.dim; ++d) row[d] *= inverse[size_t(i - first)];
        narrow(o.at(b, h, i), row, n.dim);
      }
    }
  });
}

/// Where a gradient is summed: itself if it is f32, else a wide copy, which write_back() rounds.
Tensor sum_of(const Tensor& gradient) {
  if (!gradient.defined() || gradient.dtype() == DType::f32) return gradient;
  return Tensor::empty_packed(gradient.shape(), DType::f32, Device::cpu());
}
void write_back(const Tensor& gradient, const Tensor& sum) {
  if (gradient.defined() && gradient.dtype() != DType::f32) gradient.copy_from(sum);
}

template <class T, bool kTf32>
void backward(const Tensor& dq_, const Tensor& dk_, const Tensor& dv_, const Tensor& dout_, const Tensor& q_,
              const Tensor& k_, const Tensor& v_, const Tensor& o_, const Tensor& lse_,
              const AttentionProblem& problem) {
  const Sizes n = sizes_of(q_, k_);
  // delta is a plain sum: of o and dout as they are.
  const Tensor wide[] = {attention_operand(q_, problem.math),
                         attention_operand(k_, problem.math),
                         attention_operand(v_, problem.math),
                         attention_operand(dout_, problem.math),
                         o_.to(DType::f32),
                         dout_.to(DType::f32)};
  const auto q = const_head_rows<float>(wide[0]), k = const_head_rows<float>(wide[1]),
             v = const_head_rows<float>(wide[2]), dout = const_head_rows<float>(wide[3]),
             o = const_head_rows<float>(wide[4]), plain_dout = const_head_rows<float>(wide[5]);
  const Tensor wide_bias = attention_bias(problem.bias), dscores = attention_dscores(problem, q_, k_);
  const auto bias = bias_rows<float>(wide_bias);
  const Tensor dq_sum = sum_of(dq_), dk_sum = sum_of(dk_), dv_sum = sum_of(dv_);
  const float* const lse = lse_.data<float>();
  const int64_t lse_stride = lse_.layout().stride(1);
  const AttentionDropout& drop = problem.drop;
  const float scale = float(problem.scale),
              last_scale = float(gradient_scale(problem.scale, n.keys)) * drop.scale;

  parallel_for(n.batch * n.kv_heads, 1, [&](int64_t begin, int64_t end) {
    const auto p = std::make_unique_for_overwrite<float[]>(size_t(n.tile * n.keys)),
               ds = std::make_unique_for_overwrite<float[]>(size_t(n.tile * n.keys));
    std::vector<uint8_t> dropped(size_t(n.keys), 0);
    for (int64_t kv_row = begin; kv_row < end; ++kv_row) {
      const int64_t b = kv_row / n.kv_heads, kv = kv_row % n.kv_heads;
      for (const Tensor* grad : {&dk_sum, &dv_sum})
        for (int64_t j = 0; grad->defined() && j < n.keys; ++j)
          std::fill_n(head_rows<float>(*grad).at(b, kv, j), n.dim, 0.0f);
      for (int64_t piece = 0; piece < n.group * n.tiles; ++piece) {
        const int64_t h = kv * n.group + piece / n.tiles, first = piece % n.tiles * n.tile;
        const int64_t end_row = std::min(first + n.tile, n.queries), rows = end_row - first;
        const int64_t keys = keys_of_tile(n, end_row, problem.causal);
        if (keys > 0) {
          gemm_nt(rows, keys, n.dim, q.at(b, h, first), q.row, k.at(b, kv), k.row, p.get(), keys);
          gemm_nt(rows, keys, n.dim, dout.at(b, h, first), dout.row, v.at(b, kv), v.row, ds.get(), keys);
        }
        for (int64_t i = first; i < end_row; ++i) {
          float* const p_row = &p[size_t((i - first) * keys)];
          float* const ds_row = &ds[size_t((i - first) * keys)];
          const float row_lse = lse[(b * n.heads + h) * lse_stride + i];
          const bool blind = row_lse == -std::numeric_limits<float>::infinity();
          const int64_t seen = blind ? 0 : visible_keys(i, n.queries, n.keys, problem.causal);
          const float *const o_row = o.at(b, h, i), *const dout_row = plain_dout.at(b, h, i);
          const float delta =
              drop.keep * lane_sum<float>(n.dim, [=](int64_t d) { return o_row[d] * dout_row[d]; });
          if (drop.drops()) {
            drop.row(drop_head_row(uint32_t(b), n.queries, problem.first_query, n.heads, uint32_t(h)), i,
                     seen, dropped.data());
            drop_row(ds_row, dropped.data(), seen);
          }
          with_bias(bias, b, h, i, [&](const auto& bias_of) {
            for (int64_t j = 0; j < seen; ++j) {
              p_row[j] = vector_exponential(p_row[j] * scale + (bias_of(j) - row_lse));
              ds_row[j] = p_row[j] * (ds_row[j] - delta);
            }
          });
          if (dscores.defined()) {
            float* const row =
                dscores.data<float>() + ((b * n.heads + h) * n.queries + i) * dscores.row_stride();
            for (int64_t j = 0; j < seen; ++j) row[j] = ds_row[j] * drop.scale;
          }
          round_row<T, kTf32>(p_row, seen), round_row<T, kTf32>(ds_row, seen);
          if (drop.drops()) drop_row(p_row, dropped.data(), seen);
          std::fill(p_row + seen, p_row + keys, 0.0f);
          std::fill(ds_row + seen, ds_row + keys, 0.0f);
        }
        if (keys > 0 && dk_sum.defined()) {
          const auto dk = head_rows<float>(dk_sum), dv = head_rows<float>(dv_sum);
          add_gemm_tn(keys, n.dim, rows, drop.scale, p.get(), keys, dout.at(b, h, first), dout.row,
                      dv.at(b, kv), dv.row);
          add_gemm_tn(keys, n.dim, rows, last_scale, ds.get(), keys, q.at(b, h, first), q.row, dk.at(b, kv),
                      dk.row);
        }
        if (!dq_sum.defined()) continue;
        const auto dq = head_rows<float>(dq_sum);
        if (keys > 0) {
          gemm_nn(rows, n.dim, keys, last_scale, ds.get(), keys, k.at(b, kv), k.row, dq.at(b, h, first),
                  dq.row);
        } else {
          for (int64_t i = first; i < end_row; ++i) std::fill_n(dq.at(b, h, i), n.dim, 0.0f);
        }
      }
    }
  });
  write_back(dq_, dq_sum), write_back(dk_, dk_sum), write_back(dv_, dv_sum);
  write_dbias(problem, dscores);
}

/// f.operator()<T, whether operands are rounded to TF32>()
template <class F>
void dispatch_operands(DType dtype, F32Math math, F&& f) {
  if (math == F32Math::tf32) return f.template operator()<float, true>();
  if (dtype == DType::bf16) return f.template operator()<bf16, false>();
  if (dtype == DType::f16) return f.template operator()<f16, false>();
  f.template operator()<float, false>();
}

}  // namespace

bool attention_prefers_blas(const Tensor& q, const Tensor& k) {
  // Below this a call of BLAS costs more than it saves.
  constexpr int64_t kSmallest = 32 * 32 * 32;
  if (q.dtype() == DType::f64 || k.count() == 0 || q.count() == 0) return false;
  return q.size(1) * k.size(1) * q.size(3) >= kSmallest && q.size(1) <= INT_MAX && k.size(1) <= INT_MAX;
}

void attention_forward_blas(const Tensor& o, const Tensor& lse, const Tensor& q, const Tensor& k,
                            const Tensor& v, const AttentionProblem& problem) {
  dispatch_operands(q.dtype(), problem.math,
                    [&]<class T, bool kTf32>() { forward<T, kTf32>(o, lse, q, k, v, problem); });
}

void attention_backward_blas(const Tensor& dq, const Tensor& dk, const Tensor& dv, const Tensor& dout,
                             const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& o,
                             const Tensor& lse, const AttentionProblem& problem) {
  dispatch_operands(q.dtype(), problem.math, [&]<class T, bool kTf32>() {
    backward<T, kTf32>(dq, dk, dv, dout, q, k, v, o, lse, problem);
  });
}

}  // namespace tessera::ops
