#pragma once

#include "gpu/approx.cuh"
#include "ops/attention/attention_bias.cuh"
#include "ops/attention/attention_dropout.cuh"

/// What the tensor-core kernels of variant mma, in 16 bits and in TF32, do with the scores of a warp between
/// two GEMMs. Scores are accumulators of m16n8 MMAs: S [queries, keys], or S^T [keys, queries] where a block
/// owns keys. Element e of block (m, n) is row 16 m + e / 2 * 8 + lane / 4 and column 8 n + lane % 4 * 2 + e
/// % 2; `query` and `key` are the warp's first.

namespace tessera::ops {

/// -inf for the pairs that a mask or the end of the keys hides.
template <int kM, int kN>
__device__ __forceinline__ void mask_scores(float (&s)[kM][kN][4], const AttentionCoord& coord, bool causal,
                                            int query, int key) {
  const int lane = int(threadIdx.x) % 32;
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int n = 0; n < kN; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int own_query = query + m * 16 + e / 2 * 8 + lane / 4;
        const int own_key = key + n * 8 + lane % 4 * 2 + e % 2;
        if (own_key >= coord.key_limit(causal, own_query)) s[m][n][e] = -INFINITY;
      }
}
/// The same of S^T, for the causal mask alone: rows past the last key are not stored.
template <int kM, int kN>
__device__ __forceinline__ void mask_scores_transposed(float (&s)[kM][kN][4], const AttentionCoord& coord,
                                                       bool causal, int query, int key) {
  const int lane = int(threadIdx.x) % 32;
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int n = 0; n < kN; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int own_key = key + m * 16 + e / 2 * 8 + lane / 4;
        if (coord.is_masked(causal, query + n * 8 + lane % 4 * 2 + e % 2, own_key)) s[m][n][e] = -INFINITY;
      }
}

/// Online softmax of a warp's kM * 16 rows, in base 2: for rows 16 m + lane / 4 and 8 more the highest score
/// so far and the sum of this thread's columns.
template <int kM>
struct OnlineSoftmax {
  float top[kM][2], sum[kM][2];

  __device__ __forceinline__ OnlineSoftmax() {
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        top[m][half] = -INFINITY;
        sum[m][half] = 0;
      }
  }
  /// Makes probabilities of a tile's scores, and rescales the rows of O for the new maxima.
  template <bool kBias, class T, int kN, int kColumns>
  __device__ __forceinline__ void add_tile(float (&s)[kM][kN][4], float (&o)[kM][kColumns][4],
                                           const AttentionArgs<T>& args) {
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float highest = top[m][half];
#pragma unroll
        for (int n = 0; n < kN; ++n)
          highest = fmaxf(highest, fmaxf(s[m][n][2 * half], s[m][n][2 * half + 1]));
        highest = fmaxf(highest, __shfl_xor_sync(0xFFFFFFFFu, highest, 1));
        highest = fmaxf(highest, __shfl_xor_sync(0xFFFFFFFFu, highest, 2));
        // No key seen yet: any finite base serves; -inf - -inf would be NaN.
        const float base = sees_no_key<kBias>(highest) ? 0.0f : highest * exponent_scale<kBias>(args);
        const float rescale = gpu::exp2_approx(top[m][half] * exponent_scale<kBias>(args) - base);
        top[m][half] = highest;
        float added = 0;
#pragma unroll
        for (int n = 0; n < kN; ++n)
#pragma unroll
          for (int e = 2 * half; e < 2 * half + 2; ++e) {
            s[m][n][e] = gpu::exp2_approx(fmaf(s[m][n][e], exponent_scale<kBias>(args), -base));
            added += s[m][n][e];
          }
        sum[m][half] = sum[m][half] * rescale + added;
#pragma unroll
        for (int n = 0; n < kColumns; ++n) {
          o[m][n][2 * half] *= rescale;
          o[m][n][2 * half + 1] *= rescale;
        }
      }
  }
  /// After the last tile: stores the log-sum-exp of rows below `rows`, counted from query `first`, `row`
  /// being the warp's first, and computes the factors of the rows of O, `factor` / sum.
  template <bool kBias, class T>
  __device__ __forceinline__ void finish(float (&inverse)[kM][2], float factor, const AttentionArgs<T>& args,
                                         const AttentionCoord& coord, int first, int row, int rows) const {
    const int lane = int(threadIdx.x) % 32;
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float total = sum[m][half];
        total += __shfl_xor_sync(0xFFFFFFFFu, total, 1);
        total += __shfl_xor_sync(0xFFFFFFFFu, total, 2);
        inverse[m][half] = total == 0 ? 0.0f : 1 / total;
        inverse[m][half] *= factor;
        const int own = row + m * 16 + half * 8 + lane / 4;
        if (lane % 4 == 0 && own < rows)
          args.lse[coord.lse_at(args, first + own)] =
              total == 0 ? -INFINITY : top[m][half] * score_scale<kBias>(args) + logf(total);
      }
  }
};

/// dS = P (dP - delta) in place of dP, with P = 2^(S - lse2). lse2 and delta are those of the rows.
template <bool kDrops, bool kBias, class T, int kM, int kN>
__device__ __forceinline__ void to_dscores(const float (&s)[kM][kN][4], float (&dp)[kM][kN][4],
                                           const AttentionArgs<T>& args, const float (&lse2)[kM][2],
                                           const float (&delta)[kM][2], const RowBits (&bits)[kN / 2]) {
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int n = 0; n < kN; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float p = gpu::exp2_approx(fmaf(s[m][n][e], exponent_scale<kBias>(args), -lse2[m][e / 2]));
        if constexpr (kDrops) dp[m][n][e] = bits[n / 2].drop(dp[m][n][e], n % 2, e);
        dp[m][n][e] = p * (dp[m][n][e] - delta[m][e / 2]);
      }
}
/// The same of S^T and dP^T, and P, with dropout applied, in place of S. lse2 and delta in shared memory are
/// those of the columns, from the first on.
template <bool kDrops, bool kBias, class T, int kM, int kN>
__device__ __forceinline__ void to_dscores_transposed(float (&s)[kM][kN][4], float (&dp)[kM][kN][4],
                                                      const AttentionArgs<T>& args, const float* lse2,
                                                      const float* delta, const ColumnBits (&bits)[kN / 2]) {
  const int lane = int(threadIdx.x) % 32;
#pragma unroll
  for (int n = 0; n < kN; ++n) {
    const int column = n * 8 + lane % 4 * 2;
    const float2 own_lse2 = *reinterpret_cast<const float2*>(lse2 + column);
    const float2 own_delta = *reinterpret_cast<const float2*>(delta + column);
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float p = gpu::exp2_approx(
            fmaf(s[m][n][e], exponent_scale<kBias>(args), -(e % 2 ? own_lse2.y : own_lse2.x)));
        const float row_delta = e % 2 ? own_delta.y : own_delta.x;
        if constexpr (kDrops) {
          s[m][n][e] = bits[n / 2].drop(p, n % 2, e);
          dp[m][n][e] = fmaf(s[m][n][e], dp[m][n][e], -p * row_delta);
        } else {
          s[m][n][e] = p;
          dp[m][n][e] = p * (dp[m][n][e] - row_delta);
        }
      }
  }
}

}  // namespace tessera::ops
