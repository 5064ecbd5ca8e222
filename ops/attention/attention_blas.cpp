#include <algorithm>
#include <climits>
#include <cmath>
#include <limits>
#include <memory>
#include <vector>

#include "ops/attention/attention_kernels.h"
#include "ops/gemm/sgemm_internal.h"
#include "ops/lane_sum_internal.h"
#include "ops/vector_math_internal.h"
#include "runtime/parallel.h"

/// f32 on the CPU for training: a tile of query rows at a time, its scores whole in cache (at most
/// kTileScores of them), so each of the two (forward) or five (backward) GEMMs is one sgemm and the
/// softmax one pass over rows. Bound by the GEMMs and, at small D, by the exponentials, which vectorise.

namespace tessera::ops {
namespace {

constexpr int64_t kTileScores = int64_t{1} << 17;  // 512 KiB: half of a usual second-level cache

struct Sizes {
  int64_t batch, queries, heads, dim, keys, kv_heads, group, tile, tiles;
};

Sizes sizes_of(const Tensor& q, const Tensor& k) {
  Sizes n{q.size(0), q.size(1), q.size(2), q.size(3), k.size(1), k.size(2), q.size(2) / k.size(2), 0, 0};
  n.tile = std::clamp<int64_t>(kTileScores / n.keys, 8, 128);
  n.tiles = (n.queries + n.tile - 1) / n.tile;
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

}  // namespace

bool attention_prefers_blas(const Tensor& q, const Tensor& k) {
  // Below this a call of BLAS costs more than it saves.
  constexpr int64_t kSmallest = 32 * 32 * 32;
  if (q.dtype() != DType::f32 || k.count() == 0 || q.count() == 0) return false;
  return q.size(1) * k.size(1) * q.size(3) >= kSmallest && q.size(1) <= INT_MAX && k.size(1) <= INT_MAX;
}

void attention_forward_blas(const Tensor& o_, const Tensor& lse_, const Tensor& q_, const Tensor& k_,
                            const Tensor& v_, const AttentionProblem& problem) {
  const Sizes n = sizes_of(q_, k_);
  const auto q = const_head_rows<float>(q_), k = const_head_rows<float>(k_), v = const_head_rows<float>(v_);
  const auto o = head_rows<float>(o_);
  float* const lse = lse_.data<float>();
  const int64_t lse_stride = lse_.layout().stride(1);
  const float scale = float(problem.scale), lowest = -std::numeric_limits<float>::infinity();
  const AttentionDropout& drop = problem.drop;

  parallel_for(n.batch * n.heads * n.tiles, 1, [&](int64_t begin, int64_t end) {
    const auto scores = std::make_unique_for_overwrite<float[]>(size_t(n.tile * n.keys));
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
        for (int64_t j = 0; j < seen; ++j) p[j] *= scale;
        const float top = lane_max(p, seen);
        const float base = top == lowest ? 0.0f : top;
        for (int64_t j = 0; j < seen; ++j) p[j] = vector_exponential(p[j] - base);
        const float sum = lane_sum<float>(seen, [p](int64_t j) { return p[j]; });
        const float inverse = sum == 0 ? 0.0f : drop.scale / sum;
        for (int64_t j = 0; j < seen; ++j) p[j] *= inverse;
        if (drop.drops()) {
          drop.row(drop_head_row(uint32_t(b), n.queries, problem.first_query, n.heads, uint32_t(h)), i, seen,
                   dropped.data());
          for (int64_t j = 0; j < seen; ++j) p[j] *= dropped[size_t(j)] ? 0.0f : 1.0f;  // a NaN stays one
        }
        std::fill(p + seen, p + keys, 0.0f);
        lse[head * lse_stride + i] = sum == 0 ? lowest : base + std::log(sum);
      }
      if (keys > 0) {
        gemm_nn(last - first, n.dim, keys, 1, scores.get(), keys, v.at(b, kv), v.row, o.at(b, h, first),
                o.row);
      } else {
        for (int64_t i = first; i < last; ++i) std::fill_n(o.at(b, h, i), n.dim, 0.0f);
      }
    }
  });
}

void attention_backward_blas(const Tensor& dq_, const Tensor& dk_, const Tensor& dv_, const Tensor& dout_,
                             const Tensor& q_, const Tensor& k_, const Tensor& v_, const Tensor& o_,
                             const Tensor& lse_, const AttentionProblem& problem) {
  const Sizes n = sizes_of(q_, k_);
  const auto q = const_head_rows<float>(q_), k = const_head_rows<float>(k_), v = const_head_rows<float>(v_),
             o = const_head_rows<float>(o_), dout = const_head_rows<float>(dout_);
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
      for (const Tensor* grad : {&dk_, &dv_})
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
          float delta = 0;
          for (int64_t d = 0; d < n.dim; ++d) delta += o.at(b, h, i)[d] * dout.at(b, h, i)[d];
          delta *= drop.keep;
          if (drop.drops()) {
            drop.row(drop_head_row(uint32_t(b), n.queries, problem.first_query, n.heads, uint32_t(h)), i,
                     seen, dropped.data());
            for (int64_t j = 0; j < seen; ++j) ds_row[j] *= dropped[size_t(j)] ? 0.0f : 1.0f;
          }
          for (int64_t j = 0; j < seen; ++j) {
            p_row[j] = vector_exponential(p_row[j] * scale - row_lse);
            ds_row[j] = p_row[j] * (ds_row[j] - delta);
          }
          if (drop.drops())
            for (int64_t j = 0; j < seen; ++j) p_row[j] *= dropped[size_t(j)] ? 0.0f : 1.0f;
          std::fill(p_row + seen, p_row + keys, 0.0f);
          std::fill(ds_row + seen, ds_row + keys, 0.0f);
        }
        if (keys > 0 && dk_.defined()) {
          const auto dk = head_rows<float>(dk_), dv = head_rows<float>(dv_);
          add_gemm_tn(keys, n.dim, rows, drop.scale, p.get(), keys, dout.at(b, h, first), dout.row,
                      dv.at(b, kv), dv.row);
          add_gemm_tn(keys, n.dim, rows, last_scale, ds.get(), keys, q.at(b, h, first), q.row, dk.at(b, kv),
                      dk.row);
        }
        if (!dq_.defined()) continue;
        const auto dq = head_rows<float>(dq_);
        if (keys > 0) {
          gemm_nn(rows, n.dim, keys, last_scale, ds.get(), keys, k.at(b, kv), k.row, dq.at(b, h, first),
                  dq.row);
        } else {
          for (int64_t i = first; i < end_row; ++i) std::fill_n(dq.at(b, h, i), n.dim, 0.0f);
        }
      }
    }
  });
}

}  // namespace tessera::ops
