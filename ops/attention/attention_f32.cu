#include "gpu/pack.cuh"
#include "ops/attention/attention_bias.cuh"
#include "ops/attention/attention_device.cuh"

/// Attention in f32 by plain multiply-adds, for CUDA f32: the structure of the tensor-core kernels (a block
/// owns 64 rows, walks tiles of 64, online softmax; backward in two kernels without atomics), but tiles in
/// shared memory without double buffering and scores through shared memory.
///
/// 256 threads as 16 x 16: thread (y, x) computes rows y + 16 i and columns x + 16 j of a 64 x 64 score tile,
/// and columns 2 x + 32 j of rows y + 16 i of a 64 x D result. Rows are padded by 4 floats, so that the 8
/// threads of one phase of a 16-byte load access 32 different banks. Bound by the FMA units (128 per clock
/// and SM) at two 16-byte loads from shared memory for every 16 FMAs.

namespace tessera::ops {
namespace {

constexpr int kThreads = 256;
constexpr int kTile = 64;             // rows of the own and of the walked tile
constexpr int kScoreRow = kTile + 4;  // floats
constexpr int kPer = kTile / 16;      // rows and score columns per thread
static_assert(kTile == kAttentionPad);

template <int kD>
inline constexpr int kRow = kD + 4;  // floats

template <int kD>
constexpr size_t shared_bytes(int tiles, int vectors) {
  return (size_t(tiles) * kTile * kRow<kD> + size_t(kTile) * kScoreRow + size_t(vectors) * kTile) *
         sizeof(float);
}

/// Loads rows of a tile from global memory: zeros beyond `rows` rows and `dim` columns.
template <int kD>
__device__ __forceinline__ void load_rows(float* tile, const float* from, int64_t stride, int rows, int dim) {
  for (int index = int(threadIdx.x); index < kTile * (kD / 4); index += kThreads) {
    const int row = index / (kD / 4), column = index % (kD / 4) * 4;
    float4 value = {0, 0, 0, 0};
    if (row < rows && column < dim) value = *reinterpret_cast<const float4*>(from + row * stride + column);
    *reinterpret_cast<float4*>(tile + row * kRow<kD> + column) = value;
  }
}

/// acc[i][j] += a[row y + 16 i] . b[row x + 16 j]
template <int kD>
__device__ __forceinline__ void gemm_abt(float (&acc)[kPer][kPer], const float* a, const float* b) {
  const int x = int(threadIdx.x) % 16, y = int(threadIdx.x) / 16;
#pragma unroll 4
  for (int d = 0; d < kD; d += 4) {
    float4 left[kPer], right[kPer];
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
      left[i] = *reinterpret_cast<const float4*>(a + (y + 16 * i) * kRow<kD> + d);
      right[i] = *reinterpret_cast<const float4*>(b + (x + 16 * i) * kRow<kD> + d);
    }
#pragma unroll
    for (int i = 0; i < kPer; ++i)
#pragma unroll
      for (int j = 0; j < kPer; ++j) {
        acc[i][j] = fmaf(left[i].x, right[j].x, acc[i][j]);
        acc[i][j] = fmaf(left[i].y, right[j].y, acc[i][j]);
        acc[i][j] = fmaf(left[i].z, right[j].z, acc[i][j]);
        acc[i][j] = fmaf(left[i].w, right[j].w, acc[i][j]);
      }
  }
}

/// Columns 2 x + 32 c of four rows.
template <int kD>
using Columns = float2[kPer][kD / 32];

/// acc rows y + 16 i += p[row y + 16 i] b
template <int kD>
__device__ __forceinline__ void gemm_ab(Columns<kD>& acc, const float* p, const float* b) {
  const int x = int(threadIdx.x) % 16, y = int(threadIdx.x) / 16;
#pragma unroll 2
  for (int k = 0; k < kTile; k += 4) {
    float4 left[kPer];
#pragma unroll
    for (int i = 0; i < kPer; ++i)
      left[i] = *reinterpret_cast<const float4*>(p + (y + 16 * i) * kScoreRow + k);
#pragma unroll
    for (int kk = 0; kk < 4; ++kk)
#pragma unroll
      for (int c = 0; c < kD / 32; ++c) {
        const float2 right = *reinterpret_cast<const float2*>(b + (k + kk) * kRow<kD> + 2 * x + 32 * c);
#pragma unroll
        for (int i = 0; i < kPer; ++i) {
          const float factor = kk == 0 ? left[i].x : kk == 1 ? left[i].y : kk == 2 ? left[i].z : left[i].w;
          acc[i][c].x = fmaf(factor, right.x, acc[i][c].x);
          acc[i][c].y = fmaf(factor, right.y, acc[i][c].y);
        }
      }
  }
}

__device__ __forceinline__ void store_scores(float* tile, const float (&scores)[kPer][kPer]) {
  const int x = int(threadIdx.x) % 16, y = int(threadIdx.x) / 16;
#pragma unroll
  for (int i = 0; i < kPer; ++i)
#pragma unroll
    for (int j = 0; j < kPer; ++j) tile[(y + 16 * i) * kScoreRow + x + 16 * j] = scores[i][j];
}

template <int kD>
__device__ __forceinline__ void store_columns(const Columns<kD>& acc, const float (&factor)[kPer], float* to,
                                              int64_t stride, int rows, int dim) {
  const int x = int(threadIdx.x) % 16, y = int(threadIdx.x) / 16;
#pragma unroll
  for (int i = 0; i < kPer; ++i)
#pragma unroll
    for (int c = 0; c < kD / 32; ++c)
      if (y + 16 * i < rows && 2 * x + 32 * c < dim)
        *reinterpret_cast<float2*>(to + (y + 16 * i) * stride + 2 * x + 32 * c) = {acc[i][c].x * factor[i],
                                                                                   acc[i][c].y * factor[i]};
}

/// Combines the 16 threads of a row.
__device__ __forceinline__ float row_max(float value) {
#pragma unroll
  for (int step = 8; step > 0; step /= 2) value = fmaxf(value, __shfl_xor_sync(0xFFFFFFFFu, value, step));
  return value;
}
__device__ __forceinline__ float row_sum(float value) {
#pragma unroll
  for (int step = 8; step > 0; step /= 2) value += __shfl_xor_sync(0xFFFFFFFFu, value, step);
  return value;
}

/// Which of 64 x 64 probabilities are dropped, in shared memory: for each of the 4 x 4 blocks of 16 queries
/// and 16 keys its eight words.
template <bool kDrops>
struct DropWords {
  uint32_t words[kDrops ? 16 * 8 : 1];

  /// Called by the first 128 threads, before a barrier; `query` and `key` are the first ones, multiples of
  /// 16.
  __device__ __forceinline__ void draw(const AttentionDropout& drop, uint32_t stream, uint32_t head_row,
                                       int query, int key) {
    const int block = int(threadIdx.x) / 8, r = int(threadIdx.x) % 8;
    if (block < 16)
      words[threadIdx.x] = drop.word(stream, head_row, uint32_t(query / 16 + block / 4),
                                     uint32_t((key / 16 + block % 4) * 8 + r));
  }
  /// Query i and key j, counted from the first.
  __device__ __forceinline__ bool dropped(int i, int j) const {
    return words[(i / 16 * 4 + j / 16) * 8 + i % 8] >> AttentionDropout::place_of(i, j) & 1u;
  }
};

/// Loads K and V of the tile of keys from `key` on, and which of its probabilities are dropped.
template <int kD, bool kDrops>
__device__ __forceinline__ void load_keys(float* k_tile, float* v_tile, DropWords<kDrops>& drop,
                                          const AttentionArgs<float>& args, const AttentionCoord& coord,
                                          int query, int key) {
  const int rows = coord.sequence.keys - key;
  __syncthreads();  // no warp still reads the last tile
  load_rows<kD>(k_tile, coord.k_row(args.k, coord.kv_head, key), args.k.row, rows, args.dim);
  load_rows<kD>(v_tile, coord.k_row(args.v, coord.kv_head, key), args.v.row, rows, args.dim);
  if constexpr (kDrops)
    drop.draw(args.drop, args.drop.stream(), coord.drop_row(args, coord.head), query, key);
  __syncthreads();
}

/// S [queries, keys] of the block's head from Q K^T: see attention_bias.cuh.
__device__ __forceinline__ void add_bias(float (&s)[kPer][kPer], const AttentionArgs<float>& args,
                                         const AttentionCoord& coord, int query, int key) {
  const int x = int(threadIdx.x) % 16, y = int(threadIdx.x) / 16;
#pragma unroll
  for (int i = 0; i < kPer; ++i) {
    const float* const row =
        args.bias.row(coord.b, coord.head, min(query + y + 16 * i, coord.sequence.queries - 1));
#pragma unroll
    for (int j = 0; j < kPer; ++j)
      s[i][j] =
          fmaf(s[i][j], args.scale, row[min(key + x + 16 * j, coord.sequence.keys - 1) * args.bias.key]);
  }
}
/// The same of S^T [keys, queries] of head h.
__device__ __forceinline__ void add_bias_transposed(float (&s)[kPer][kPer], const AttentionArgs<float>& args,
                                                    const AttentionCoord& coord, int h, int query, int key) {
  const int x = int(threadIdx.x) % 16, y = int(threadIdx.x) / 16;
#pragma unroll
  for (int j = 0; j < kPer; ++j) {
    const float* const row = args.bias.row(coord.b, h, min(query + x + 16 * j, coord.sequence.queries - 1));
#pragma unroll
    for (int i = 0; i < kPer; ++i)
      s[i][j] =
          fmaf(s[i][j], args.scale, row[min(key + y + 16 * i, coord.sequence.keys - 1) * args.bias.key]);
  }
}

template <int kD, bool kDrops, bool kBias>
__global__ void __launch_bounds__(kThreads, 1) attention_forward_f32_kernel(AttentionArgs<float> args) {
  extern __shared__ float4 shared[];
  float* const q_tile = reinterpret_cast<float*>(shared);
  float* const k_tile = q_tile + kTile * kRow<kD>;
  float* const v_tile = k_tile + kTile * kRow<kD>;
  float* const p_tile = v_tile + kTile * kRow<kD>;  // [kTile, kScoreRow]
  __shared__ AttentionCoord coord;
  if (!find_coord<true>(args, kTile, coord)) return;
  const int first = coord.sequence.tile * kTile, rows = min(coord.sequence.queries - first, kTile);
  const int x = int(threadIdx.x) % 16, y = int(threadIdx.x) / 16;
  load_rows<kD>(q_tile, coord.q_row(args.q, coord.head, first), args.q.row, rows, args.dim);

  Columns<kD> o = {};
  float top[kPer], sum[kPer] = {};  // `sum` only of this thread's columns
#pragma unroll
  for (int i = 0; i < kPer; ++i) top[i] = -INFINITY;

  __shared__ DropWords<kDrops> drop;
  const int end = coord.key_limit(args.causal, first + rows - 1);
  for (int key = 0; key < end; key += kTile) {
    load_keys<kD>(k_tile, v_tile, drop, args, coord, first, key);
    float s[kPer][kPer] = {};
    gemm_abt<kD>(s, q_tile, k_tile);
    if constexpr (kBias) add_bias(s, args, coord, first, key);
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
      const int limit = coord.key_limit(args.causal, first + y + 16 * i);
      float highest = top[i];
#pragma unroll
      for (int j = 0; j < kPer; ++j) {
        if (key + x + 16 * j >= limit) s[i][j] = -INFINITY;
        highest = fmaxf(highest, s[i][j]);
      }
      highest = row_max(highest);
      const float base =
          sees_no_key<kBias>(highest) ? 0.0f : highest;  // no key seen yet: any finite base serves
      const float rescale = exp2f((top[i] - base) * exponent_scale<kBias>(args));
      top[i] = highest;
      sum[i] *= rescale;
#pragma unroll
      for (int j = 0; j < kPer; ++j) {
        s[i][j] = exp2f((s[i][j] - base) * exponent_scale<kBias>(args));
        sum[i] += s[i][j];
        if constexpr (kDrops) s[i][j] = drop.dropped(y + 16 * i, x + 16 * j) ? 0.0f : s[i][j];
      }
#pragma unroll
      for (int c = 0; c < kD / 32; ++c) {
        o[i][c].x *= rescale;
        o[i][c].y *= rescale;
      }
    }
    store_scores(p_tile, s);
    __syncthreads();
    gemm_ab<kD>(o, p_tile, v_tile);
  }

  float inverse[kPer];
#pragma unroll
  for (int i = 0; i < kPer; ++i) {
    const float total = row_sum(sum[i]);
    inverse[i] = total == 0 ? 0.0f : 1 / total;
    if constexpr (kDrops) inverse[i] *= args.drop.scale;
    if (x == 0 && y + 16 * i < rows)
      args.lse[coord.lse_at(args, first + y + 16 * i)] =
          total == 0 ? -INFINITY : top[i] * score_scale<kBias>(args) + logf(total);
  }
  store_columns<kD>(o, inverse, coord.q_row(args.out, coord.head, first), args.out.row, rows, args.dim);
}

template <int kD, bool kDrops, bool kBias>
__global__ void __launch_bounds__(kThreads, 1) attention_backward_keys_f32_kernel(AttentionArgs<float> args) {
  extern __shared__ float4 shared[];
  float* const k_tile = reinterpret_cast<float*>(shared);
  float* const v_tile = k_tile + kTile * kRow<kD>;
  float* const q_tile = v_tile + kTile * kRow<kD>;
  float* const dout_tile = q_tile + kTile * kRow<kD>;
  float* const score_tile = dout_tile + kTile * kRow<kD>;  // [keys, queries]
  float* const lse2 = score_tile + kTile * kScoreRow;
  float* const delta = lse2 + kTile;
  __shared__ AttentionCoord coord;
  if (!find_coord<false>(args, kTile, coord)) return;
  const int first = coord.sequence.tile * kTile, rows = min(coord.sequence.keys - first, kTile);
  const int x = int(threadIdx.x) % 16, y = int(threadIdx.x) / 16;
  load_rows<kD>(k_tile, coord.k_row(args.k, coord.kv_head, first), args.k.row, rows, args.dim);
  load_rows<kD>(v_tile, coord.k_row(args.v, coord.kv_head, first), args.v.row, rows, args.dim);

  Columns<kD> dk = {}, dv = {};
  [[maybe_unused]] float key_sum[kPer] = {};  // dS of the thread's keys, over its queries of head h
  // The heads of the group are walked one after the other; queries before `begin` see none of the keys.
  const int begin = coord.first_query(args.causal, first) / kTile * kTile;
  const int walked = max(0, int(gpu::ceil_div(coord.sequence.queries - begin, kTile)));
  __shared__ DropWords<kDrops> drop;
  for (int n = 0; n < walked * args.group; ++n) {
    const int h = coord.head + n / walked, query = begin + n % walked * kTile;
    __syncthreads();  // no warp still reads the last tile
    load_rows<kD>(q_tile, coord.q_row(args.q, h, query), args.q.row, coord.sequence.queries - query,
                  args.dim);
    load_rows<kD>(dout_tile, coord.q_row(args.dout, h, query), args.dout.row, coord.sequence.queries - query,
                  args.dim);
    if (int(threadIdx.x) < kTile) {
      const int64_t at = coord.statistics_at(args, h) + query + int(threadIdx.x);
      lse2[threadIdx.x] = args.lse2[at];
      delta[threadIdx.x] = args.delta[at];
    }
    if constexpr (kDrops) drop.draw(args.drop, args.drop.stream(), coord.drop_row(args, h), query, first);
    __syncthreads();
    float p[kPer][kPer] = {}, ds[kPer][kPer] = {};  // [keys, queries]
    gemm_abt<kD>(p, k_tile, q_tile);
    gemm_abt<kD>(ds, v_tile, dout_tile);
    if constexpr (kBias) add_bias_transposed(p, args, coord, h, query, first);
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
      const int first_query = coord.first_query(args.causal, first + y + 16 * i);
#pragma unroll
      for (int j = 0; j < kPer; ++j) {
        const int column = x + 16 * j;
        p[i][j] = query + column < first_query
                      ? 0.0f
                      : exp2f(fmaf(p[i][j], exponent_scale<kBias>(args), -lse2[column]));
        if constexpr (kDrops) {
          const bool dropped = drop.dropped(column, y + 16 * i);
          ds[i][j] = p[i][j] * ((dropped ? 0.0f : ds[i][j]) - delta[column]);
          p[i][j] = dropped ? 0.0f : p[i][j];
        } else {
          ds[i][j] = p[i][j] * (ds[i][j] - delta[column]);
        }
      }
    }
    if constexpr (kBias)
      if (args.key_sums) {
        const bool last_of_head = (n + 1) % walked == 0;
#pragma unroll
        for (int i = 0; i < kPer; ++i) {
#pragma unroll
          for (int j = 0; j < kPer; ++j) key_sum[i] += ds[i][j];
          if (!last_of_head) continue;
          const float total = row_sum(key_sum[i]) * (kDrops ? args.drop.scale : 1.0f);
          if (x == 0 && y + 16 * i < rows)
            args.key_sums[(int64_t(coord.b) * args.heads + h) * args.key_sums_row + first + y + 16 * i] =
                total;
          key_sum[i] = 0;
        }
      }
    store_scores(score_tile, p);
    __syncthreads();
    gemm_ab<kD>(dv, score_tile, dout_tile);
    __syncthreads();
    store_scores(score_tile, ds);
    __syncthreads();
    gemm_ab<kD>(dk, score_tile, q_tile);
  }
  if (kBias && !args.dk.data) return;
  float one[kPer], last[kPer];
#pragma unroll
  for (int i = 0; i < kPer; ++i)
    one[i] = kDrops ? args.drop.scale : 1.0f, last[i] = coord.grad_scale<kDrops>(args);
  store_columns<kD>(dk, last, coord.k_row(args.dk, coord.kv_head, first), args.dk.row, rows, args.dim);
  store_columns<kD>(dv, one, coord.k_row(args.dv, coord.kv_head, first), args.dv.row, rows, args.dim);
}

template <int kD, bool kDrops, bool kBias>
__global__ void __launch_bounds__(kThreads, 1)
    attention_backward_queries_f32_kernel(AttentionArgs<float> args) {
  extern __shared__ float4 shared[];
  float* const q_tile = reinterpret_cast<float*>(shared);
  float* const dout_tile = q_tile + kTile * kRow<kD>;
  float* const k_tile = dout_tile + kTile * kRow<kD>;
  float* const v_tile = k_tile + kTile * kRow<kD>;
  float* const score_tile = v_tile + kTile * kRow<kD>;  // [queries, keys]
  __shared__ AttentionCoord coord;
  if (!find_coord<true>(args, kTile, coord)) return;
  const int first = coord.sequence.tile * kTile, rows = min(coord.sequence.queries - first, kTile);
  const int x = int(threadIdx.x) % 16, y = int(threadIdx.x) / 16;
  load_rows<kD>(q_tile, coord.q_row(args.q, coord.head, first), args.q.row, rows, args.dim);
  load_rows<kD>(dout_tile, coord.q_row(args.dout, coord.head, first), args.dout.row, rows, args.dim);

  Columns<kD> dq = {};
  float lse2[kPer], delta[kPer];
#pragma unroll
  for (int i = 0; i < kPer; ++i) {
    const int64_t at = coord.statistics_at(args, coord.head) + first + y + 16 * i;  // below padded_queries
    lse2[i] = args.lse2[at];
    delta[i] = args.delta[at];
  }
  __shared__ DropWords<kDrops> drop;
  const int end = coord.key_limit(args.causal, first + rows - 1);
  for (int key = 0; key < end; key += kTile) {
    load_keys<kD>(k_tile, v_tile, drop, args, coord, first, key);
    float p[kPer][kPer] = {}, ds[kPer][kPer] = {};  // [queries, keys]
    gemm_abt<kD>(p, q_tile, k_tile);
    gemm_abt<kD>(ds, dout_tile, v_tile);
    if constexpr (kBias) add_bias(p, args, coord, first, key);
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
      const int limit = coord.key_limit(args.causal, first + y + 16 * i);
#pragma unroll
      for (int j = 0; j < kPer; ++j) {
        const float weight =
            key + x + 16 * j >= limit ? 0.0f : exp2f(fmaf(p[i][j], exponent_scale<kBias>(args), -lse2[i]));
        if constexpr (kDrops) ds[i][j] = drop.dropped(y + 16 * i, x + 16 * j) ? 0.0f : ds[i][j];
        ds[i][j] = weight * (ds[i][j] - delta[i]);
      }
    }
    if constexpr (kBias)
      if (args.dbias)
#pragma unroll
        for (int i = 0; i < kPer; ++i)
#pragma unroll
          for (int j = 0; j < kPer; ++j)
            if (y + 16 * i < rows && key + x + 16 * j < args.keys)
              dbias_row(args, coord, first + y + 16 * i)[key + x + 16 * j] =
                  ds[i][j] * (kDrops ? args.drop.scale : 1.0f);
    store_scores(score_tile, ds);
    __syncthreads();
    gemm_ab<kD>(dq, score_tile, k_tile);
  }
  if constexpr (kBias)
    if (args.dbias) clear_dbias(args, coord, first, rows, int(gpu::ceil_div(end, kTile)) * kTile);
  if (kBias && !args.dq.data) return;
  float last[kPer];
#pragma unroll
  for (int i = 0; i < kPer; ++i) last[i] = coord.grad_scale<kDrops>(args);
  store_columns<kD>(dq, last, coord.q_row(args.dq, coord.head, first), args.dq.row, rows, args.dim);
}

/// The gradient of a bias: see attention_bias.cuh.
template <int kD, bool kDrops>
__global__ void __launch_bounds__(kThreads, 1)
    attention_backward_bias_f32_kernel(AttentionArgs<float> args, BiasGradient<float> gradient) {
  static_assert(kTile == kBiasTile);
  extern __shared__ float4 shared[];
  float* const q_tile = reinterpret_cast<float*>(shared);
  float* const dout_tile = q_tile + kTile * kRow<kD>;
  float* const k_tile = dout_tile + kTile * kRow<kD>;
  float* const v_tile = k_tile + kTile * kRow<kD>;
  __shared__ DropWords<kDrops> drop;
  const BiasTile tile = gradient.tile();
  const int x = int(threadIdx.x) % 16, y = int(threadIdx.x) / 16;
  const int first = tile.query_tile * kTile, rows = min(args.queries - first, kTile);
  const int key = tile.key_tile * kTile, keys = args.keys - key;

  float sum[kPer][kPer] = {};  // [queries, keys]
  for (int index = tile.begin; index < tile.end; ++index) {
    const AttentionCoord coord = gradient.coord(args, tile, index);
    if (coord.key_limit(args.causal, first + rows - 1) <= key) break;  // all batches and heads are masked
    __syncthreads();                                                   // no warp still reads the tiles
    load_rows<kD>(q_tile, coord.q_row(args.q, coord.head, first), args.q.row, rows, args.dim);
    load_rows<kD>(dout_tile, coord.q_row(args.dout, coord.head, first), args.dout.row, rows, args.dim);
    load_rows<kD>(k_tile, coord.k_row(args.k, coord.kv_head, key), args.k.row, keys, args.dim);
    load_rows<kD>(v_tile, coord.k_row(args.v, coord.kv_head, key), args.v.row, keys, args.dim);
    if constexpr (kDrops)
      drop.draw(args.drop, args.drop.stream(), coord.drop_row(args, coord.head), first, key);
    __syncthreads();
    float p[kPer][kPer] = {}, ds[kPer][kPer] = {};
    gemm_abt<kD>(p, q_tile, k_tile);
    gemm_abt<kD>(ds, dout_tile, v_tile);
    add_bias(p, args, coord, first, key);
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
      const int row = first + y + 16 * i, limit = coord.key_limit(args.causal, row);
      const int64_t at = coord.statistics_at(args, coord.head) + row;
      const float lse2 = args.lse2[at], delta = args.delta[at];  // lse2 past the last query is +inf: P = 0
#pragma unroll
      for (int j = 0; j < kPer; ++j) {
        const float weight =
            key + x + 16 * j >= limit ? 0.0f : exp2f(fmaf(p[i][j], exponent_scale<true>(args), -lse2));
        if constexpr (kDrops) ds[i][j] = drop.dropped(y + 16 * i, x + 16 * j) ? 0.0f : ds[i][j];
        sum[i][j] = fmaf(weight, ds[i][j] - delta, sum[i][j]);
      }
    }
  }

  const float factor = kDrops ? args.drop.scale : 1.0f;
#pragma unroll
  for (int i = 0; i < kPer; ++i)
#pragma unroll
    for (int j = 0; j < kPer; ++j)
      gradient.store(args, tile, first + y + 16 * i, key + x + 16 * j, sum[i][j] * factor);
}

}  // namespace

void attention_forward_f32_cuda(const Tensor& q, const AttentionArgs<float>& args) {
  dispatch_kernel(args, [&]<int kD, bool kDrops, bool kBias>() {
    launch_attention(q, args, kTile, kThreads, shared_bytes<kD>(3, 0),
                     attention_forward_f32_kernel<kD, kDrops, kBias>);
  });
}

void attention_backward_f32_cuda(const Tensor& q, const Tensor& k, const AttentionArgs<float>& args) {
  dispatch_kernel(args, [&]<int kD, bool kDrops, bool kBias>() {
    if (args.dk.data || args.key_sums)
      launch_attention(k, args, kTile, kThreads, shared_bytes<kD>(4, 2),
                       attention_backward_keys_f32_kernel<kD, kDrops, kBias>);
    if (args.dq.data || args.dbias)
      launch_attention(q, args, kTile, kThreads, shared_bytes<kD>(4, 0),
                       attention_backward_queries_f32_kernel<kD, kDrops, kBias>);
  });
}

void attention_backward_bias_f32_cuda(const Tensor& q, const Tensor& k, const AttentionArgs<float>& args,
                                      const AttentionProblem& problem) {
  sum_bias_gradient<float>(q, k, problem, [&](unsigned blocks, const BiasGradient<float>& gradient) {
    dispatch_wide_head_size(args.dim, args.drop, [&]<int kD, bool kDrops>() {
      constexpr size_t kBytes = size_t(4 * kTile) * kRow<kD> * sizeof(float);
      gpu::launch(q.device(), {dim3(blocks), dim3(kThreads), kBytes},
                  attention_backward_bias_f32_kernel<kD, kDrops>, args, gradient);
    });
  });
}

}  // namespace tessera::ops
