#include <cblas.h>

#include <algorithm>
#include <bit>
#include <climits>
#include <cmath>
#include <limits>
#include <vector>

#include "ops/attention/attention_kernels.h"
#include "runtime/parallel.h"

/// f32 on the CPU for training: a tile of query rows at a time, its scores whole in cache (at most
/// kTileScores of them), so each of the two (forward) or five (backward) products is one sgemm and the
/// softmax one pass over rows. Bound by the products and, at small D, by the exponentials, which vectorise.

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

/// While it lives, an OpenBLAS that has threads of its own uses one: here each of our threads calls it, and
/// its threads on top of ours would only stand in each other's way. The OpenMP build sees to that by itself.
class OneBlasThread {
 public:
  explicit OneBlasThread(int64_t pieces) {
    constexpr int kOwnThreads = 1;  // openblas_get_parallel: 0 none, 1 threads of its own, 2 OpenMP
    if (pieces > 1 && cpu_threads() > 1 && openblas_get_parallel() == kOwnThreads) {
      before_ = openblas_get_num_threads();
      openblas_set_num_threads(1);
    }
  }
  ~OneBlasThread() {
    if (before_ > 0) openblas_set_num_threads(before_);
  }
  OneBlasThread(const OneBlasThread&) = delete;

 private:
  int before_ = 0;
};

/// c [m, n] = a [m, k] b [n, k]^T
void product_nt(int64_t m, int64_t n, int64_t k, const float* a, int64_t lda, const float* b, int64_t ldb,
                float* c, int64_t ldc) {
  cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, int(m), int(n), int(k), 1, a, int(lda), b, int(ldb), 0,
              c, int(ldc));
}
/// c [m, n] = factor a [m, k] b [k, n]
void product_nn(int64_t m, int64_t n, int64_t k, float factor, const float* a, int64_t lda, const float* b,
                int64_t ldb, float* c, int64_t ldc) {
  cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, int(m), int(n), int(k), factor, a, int(lda), b,
              int(ldb), 0, c, int(ldc));
}
/// c [m, n] += factor a [k, m]^T b [k, n]
void add_product_tn(int64_t m, int64_t n, int64_t k, float factor, const float* a, int64_t lda,
                    const float* b, int64_t ldb, float* c, int64_t ldc) {
  cblas_sgemm(CblasRowMajor, CblasTrans, CblasNoTrans, int(m), int(n), int(k), factor, a, int(lda), b,
              int(ldb), 1, c, int(ldc));
}

/// e^x to within 1.5 ulp as plain arithmetic, which vectorises where std::exp does not. 0 below -86.9,
/// infinity above 88.7, NaN for NaN. Cody and Waite's reduction x = n ln 2 + r, and a polynomial of degree 6
/// in r.
inline float exponential(float x) {
  const float clamped = x < -86.9f ? -86.9f : (x > 88.7f ? 88.7f : x);
  const float shifted = clamped * 1.44269504f + 12582912.0f;  // 1.5 * 2^23: the sum's low bits are n
  const float n = shifted - 12582912.0f;
  const float r = (clamped - n * 0.693359375f) + n * 2.12194440e-4f;
  float y = 1.9875691500e-4f;
  y = y * r + 1.3981999507e-3f;
  y = y * r + 8.3334519073e-3f;
  y = y * r + 4.1665795894e-2f;
  y = y * r + 1.6666665459e-1f;
  y = y * r + 5.0000001201e-1f;
  y = y * r * r + r + 1.0f;
  // 2^(n - 1) * 2, as 2^128 has no bits of its own.
  const float power = std::bit_cast<float>((std::bit_cast<uint32_t>(shifted) + 126u) << 23);
  const float result = y * power * 2.0f;
  const float bounded = x < -86.9f ? 0.0f : (x > 88.7f ? std::numeric_limits<float>::infinity() : result);
  return x == x ? bounded : x;
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

  const OneBlasThread one(n.batch * n.heads * n.tiles);
  parallel_for(n.batch * n.heads * n.tiles, 1, [&](int64_t begin, int64_t end) {
    std::vector<float> scores(size_t(n.tile * n.keys));
    std::vector<uint8_t> dropped(size_t(n.keys), 0);
    for (int64_t piece = begin; piece < end; ++piece) {
      const int64_t head = piece / n.tiles, b = head / n.heads, h = head % n.heads, kv = h / n.group;
      const int64_t first = piece % n.tiles * n.tile, last = std::min(first + n.tile, n.queries);
      const int64_t keys = keys_of_tile(n, last, problem.causal);
      if (keys > 0)
        product_nt(last - first, keys, n.dim, q.at(b, h, first), q.row, k.at(b, kv), k.row, scores.data(),
                   keys);
      for (int64_t i = first; i < last; ++i) {
        float* const p = &scores[size_t((i - first) * keys)];
        const int64_t seen = visible_keys(i, n.queries, n.keys, problem.causal);
        float top = lowest, sum = 0;
        for (int64_t j = 0; j < seen; ++j) {
          p[j] *= scale;
          top = p[j] > top ? p[j] : top;
        }
        const float base = top == lowest ? 0.0f : top;
        for (int64_t j = 0; j < seen; ++j) p[j] = exponential(p[j] - base);
#pragma omp simd reduction(+ : sum)
        for (int64_t j = 0; j < seen; ++j) sum += p[j];
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
        product_nn(last - first, n.dim, keys, 1, scores.data(), keys, v.at(b, kv), v.row, o.at(b, h, first),
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

  const OneBlasThread one(n.batch * n.kv_heads);
  parallel_for(n.batch * n.kv_heads, 1, [&](int64_t begin, int64_t end) {
    std::vector<float> p(size_t(n.tile * n.keys)), ds(size_t(n.tile * n.keys));
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
          product_nt(rows, keys, n.dim, q.at(b, h, first), q.row, k.at(b, kv), k.row, p.data(), keys);
          product_nt(rows, keys, n.dim, dout.at(b, h, first), dout.row, v.at(b, kv), v.row, ds.data(), keys);
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
            p_row[j] = exponential(p_row[j] * scale - row_lse);
            ds_row[j] = p_row[j] * (ds_row[j] - delta);
          }
          if (drop.drops())
            for (int64_t j = 0; j < seen; ++j) p_row[j] *= dropped[size_t(j)] ? 0.0f : 1.0f;
          std::fill(p_row + seen, p_row + keys, 0.0f);
          std::fill(ds_row + seen, ds_row + keys, 0.0f);
        }
        if (keys > 0 && dk_.defined()) {
          const auto dk = head_rows<float>(dk_), dv = head_rows<float>(dv_);
          add_product_tn(keys, n.dim, rows, drop.scale, p.data(), keys, dout.at(b, h, first), dout.row,
                         dv.at(b, kv), dv.row);
          add_product_tn(keys, n.dim, rows, last_scale, ds.data(), keys, q.at(b, h, first), q.row,
                         dk.at(b, kv), dk.row);
        }
        if (!dq_.defined()) continue;
        const auto dq = head_rows<float>(dq_);
        if (keys > 0) {
          product_nn(rows, n.dim, keys, last_scale, ds.data(), keys, k.at(b, kv), k.row, dq.at(b, h, first),
                     dq.row);
        } else {
          for (int64_t i = first; i < end_row; ++i) std::fill_n(dq.at(b, h, i), n.dim, 0.0f);
        }
      }
    }
  });
}

}  // namespace tessera::ops
