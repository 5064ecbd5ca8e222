#include <algorithm>

#include "gpu/approx.cuh"
#include "gpu/dependent_launch.cuh"
#include "gpu/pack.cuh"
#include "gpu/reread.cuh"
#include "ops/attention/attention_device.cuh"
#include "ops/attention/attention_dropout.cuh"
#include "ops/attention/attention_tile.cuh"
#include "ops/attention/attention_variants.h"

/// Backward with few queries: at most 64 rows, the queries of all heads that read one K/V head. A block has
/// all of these rows and walks over a split of the keys, 64 at a time, so that dK and dV of a tile are final
/// at once, and dQ accumulates in registers. Splits store their dQ in f32, and a last kernel adds them in key
/// order; no synchronisation between blocks is needed. A single split writes dQ itself. Each block computes
/// delta and lse in base 2 for its rows, 64 at most.
///
/// The GEMMs are those of attention_backward.cu, each computed once: a warp has 16 keys of the tile, S^T and
/// dP^T stay in its registers as the left operands of dV and dK; dS passes through shared memory, since a
/// warp computes its queries' (and columns') share of dQ += dS K over all 64 keys.
///
/// Bytes: K, V, dK and dV once, 8 D per key; FLOPs 10 D rows per key. At 64 rows and D = 64 a tile is 32 KiB
/// and 2.6 MFLOP: 1.4 us of an SM's share of memory, 0.75 us of its shared memory. Bound by memory, if enough
/// blocks share an SM to cover its latency: hence mma.sync with 40 to 100 KiB per block.

namespace tessera::ops {
namespace {

constexpr int kThreads = 128, kWarps = 4;
constexpr int kTile = 64;  // keys at a time, 16 a warp
static_assert(kTile == kWarps * 16);

template <class T>
struct FewArgs {
  AttentionArgs<T> attention;
  float*
      partial;  // partial dQ: [kv head rows, slots, rows, dim]; null: one range per head, or dQ is not wanted
  int64_t slots;       // ranges per head (packed sequences: slots of ranges)
  int range;           // keys per block, a multiple of kTile
  int rows;            // rows of a key head, at most
  bool queries, keys;  // whether dQ, dK and dV are wanted
  bool drops;

  /// Distance in rows between the first queries of two heads: with dropout, whose bits come in blocks of 16
  /// queries, every head starts at such a block.
  TESSERA_HD static int stride(int queries, bool drops) { return drops ? (queries + 15) / 16 * 16 : queries; }
};

template <int kD, int kRows>
struct FewTile {
  static constexpr size_t kBytes =
      size_t(2 * kRows * kD + 4 * kTile * kD + kTile * kRows) * 2 + 2 * kRows * sizeof(float);
  static constexpr int kBlocks = kD <= 32 ? 4 : kD <= 64 ? (kRows == 32 ? 4 : 3) : 2;  // per SM
  // A warp's part of dQ: 16 rows, and kColumns blocks of 16 columns.
  static constexpr int kRowParts = kRows / 16, kColumnParts = kWarps / kRowParts,
                       kColumns = kD / 16 / kColumnParts;  // in sixteens
  static_assert(kRowParts * kColumnParts == kWarps && kColumns * kColumnParts * 16 == kD);
};

/// Writes zeros to dK and dV of keys first ... end - 1, for a sequence without queries.
template <class T>
__device__ __forceinline__ void clear_keys(const AttentionArgs<T>& args, const AttentionCoord& coord,
                                           int first, int end) {
  const int thread = int(threadIdx.x);
  const int chunks = args.dim / 8;
  for (int index = thread; index < (end - first) * chunks; index += kThreads) {
    const int key = first + index / chunks, column = index % chunks * 8;
    *reinterpret_cast<uint4*>(coord.k_row(args.dk, coord.kv_head, key) + column) = uint4{};
    *reinterpret_cast<uint4*>(coord.k_row(args.dv, coord.kv_head, key) + column) = uint4{};
  }
}

/// Issues the copies of Q and dO of all rows: those of every query head that reads the key head.
template <class T, int kD, int kRows>
__device__ __forceinline__ void load_queries(const AttentionArgs<T>& args, const AttentionCoord& coord,
                                             int stride, T* q_tile, T* dout_tile) {
  const int thread = int(threadIdx.x), queries = coord.sequence.queries, rows = args.group * stride;
  for (int index = thread; index < kRows * (kD / 8); index += kThreads) {
    const int row = index / (kD / 8), chunk = index % (kD / 8), member = row / stride, i = row % stride;
    const bool valid = row < rows && i < queries && chunk * 8 < args.dim;
    const int h = valid ? coord.head + member : coord.head, at = valid ? i : 0,
              column = valid ? chunk * 8 : 0;
    const uint32_t to = 2 * uint32_t(tile_offset<kD>(row, chunk));
    gpu::cp_async_16(gpu::shared_address(q_tile) + to, coord.q_row(args.q, h, at) + column, valid);
    gpu::cp_async_16(gpu::shared_address(dout_tile) + to, coord.q_row(args.dout, h, at) + column, valid);
  }
}

/// Computes a row's lse in base 2 and delta = dO . O.
template <class T, int kRows>
__device__ __forceinline__ void make_statistics(const AttentionArgs<T>& args, const AttentionCoord& coord,
                                                int stride, float* lse2, float* delta) {
  const int thread = int(threadIdx.x), queries = coord.sequence.queries, rows = args.group * stride;
  constexpr int kLanes = kThreads / kRows;
  const int row = thread / kLanes, member = row / stride, i = row % stride;
  const bool exists = row < rows && i < queries;
  float sum = 0;
  if (exists) {
    const T* const o = coord.q_row(args.o, coord.head + member, i);
    const T* const dout = coord.q_row(args.dout, coord.head + member, i);
    for (int column = thread % kLanes * 8; column < args.dim; column += kLanes * 8) {
      const auto a = gpu::load_pack<8>(o + column);
      const auto b = gpu::load_pack<8>(dout + column);
#pragma unroll
      for (int e = 0; e < 8; ++e) sum += float(a.at[e]) * float(b.at[e]);
    }
  }
#pragma unroll
  for (int step = kLanes / 2; step > 0; step /= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, step);
  if (thread % kLanes == 0) {
    const float lse = exists
                          ? args.lse[(int64_t(coord.b) * args.heads + coord.head + member) * args.lse_stride +
                                     coord.sequence.q_first + i]
                          : -INFINITY;
    lse2[row] = lse == -INFINITY ? INFINITY : lse * 1.44269504f;
    delta[row] = sum * args.drop.keep;
  }
}

/// dQ += dS^T K of a key tile: a warp's part, see FewTile.
template <class T, int kD, int kRows>
__device__ __forceinline__ void add_queries(float (&dq)[2 * FewTile<kD, kRows>::kColumns][4],
                                            const T* ds_tile, const T* k_tile, int thread, int lane) {
  using Tile = FewTile<kD, kRows>;
  const int row_part = thread / 32 % Tile::kRowParts,
            column_part = thread / 32 / Tile::kRowParts * Tile::kColumns;
  const uint32_t left_base =
      gpu::shared_address(ds_tile) +
      2 * uint32_t(tile_offset<kRows>(lane / 16 * 8 + lane % 8, 2 * row_part + lane / 8 % 2));
  const uint32_t right_base =
      gpu::shared_address(k_tile) + 2 * uint32_t(tile_offset<kD>(lane % 16, lane / 16));
#pragma unroll
  for (int k = 0; k < kTile / 16; ++k) {
    uint32_t left[4];
    gpu::ldmatrix_x4_trans(left, left_base + 2 * uint32_t(k * 16 * kRows));
#pragma unroll
    for (int n = 0; n < Tile::kColumns; ++n) {
      uint32_t right[4];
      gpu::ldmatrix_x4_trans(right, skip_chunks<kD>(right_base, column_part + n) + 2 * uint32_t(k * 16 * kD));
      gpu::mma_m16n8k16<T>(dq[2 * n], left, right[0], right[1]);
      gpu::mma_m16n8k16<T>(dq[2 * n + 1], left, right[2], right[3]);
    }
  }
}

/// Epilogue: stores dQ, or in f32 this range's partial dQ.
template <class T, int kD, int kRows, bool kDrops>
__device__ __forceinline__ void store_queries(const FewArgs<T>& few, const AttentionCoord& coord, int stride,
                                              const float (&dq)[2 * FewTile<kD, kRows>::kColumns][4]) {
  using Tile = FewTile<kD, kRows>;
  const AttentionArgs<T>& args = few.attention;
  const int thread = int(threadIdx.x), lane = thread % 32;
  const int queries = coord.sequence.queries, rows = args.group * stride;
  const int row_part = thread / 32 % Tile::kRowParts,
            column_part = thread / 32 / Tile::kRowParts * Tile::kColumns;
  const float last = coord.grad_scale<kDrops>(args);
  const int slot = args.seqlens.packed()
                       ? coord.sequence.k_first / few.range + coord.sequence.index + coord.sequence.tile
                       : coord.sequence.tile;
  const int64_t range = (int64_t(coord.b) * args.kv_heads + coord.kv_head) * few.slots + slot;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = row_part * 16 + half * 8 + lane / 4, member = row / stride, i = row % stride;
    if (row >= rows || i >= queries) continue;
#pragma unroll
    for (int n = 0; n < 2 * Tile::kColumns; ++n) {
      const int column = (2 * column_part + n) * 8 + lane % 4 * 2;
      if (column >= args.dim) continue;
      const float x = dq[n][2 * half], y = dq[n][2 * half + 1];
      if (few.partial)
        *reinterpret_cast<float2*>(few.partial + (range * few.rows + row) * args.dim + column) = {x, y};
      else
        *reinterpret_cast<uint32_t*>(coord.q_row(args.dq, coord.head + member, i) + column) =
            gpu::pack_halves<T>(x * last, y * last);
    }
  }
}

template <class T, int kD, int kRows, bool kDrops>
__global__ void __launch_bounds__(kThreads, (FewTile<kD, kRows>::kBlocks))
    attention_backward_few_kernel(const __grid_constant__ FewArgs<T> few) {
  using Tile = FewTile<kD, kRows>;
  const AttentionArgs<T>& args = few.attention;
  extern __shared__ __align__(1024) uint4 shared[];
  T* const q_tile = reinterpret_cast<T*>(shared);                         // [kRows, kD]
  T* const dout_tile = q_tile + kRows * kD;                               // [kRows, kD]
  T* const k_tiles = dout_tile + kRows * kD;                              // 2 x [kTile, kD]
  T* const v_tiles = k_tiles + 2 * kTile * kD;                            // 2 x [kTile, kD]
  T* const ds_tile = v_tiles + 2 * kTile * kD;                            // [kTile, kRows]
  float* const lse2 = reinterpret_cast<float*>(ds_tile + kTile * kRows);  // +inf where P is 0
  float* const delta = lse2 + kRows;
  __shared__ AttentionCoord coord;
  gpu::wait_and_launch_dependents();
  if (!find_coord<false>(args, few.range, coord)) return;
  const int lane = int(threadIdx.x) % 32;
  const int queries = coord.sequence.queries, keys = coord.sequence.keys;
  const int first = coord.sequence.tile * few.range, end = min(first + few.range, keys);
  const int stride = FewArgs<T>::stride(queries, kDrops);

  if (queries == 0) {
    if (few.keys) clear_keys(args, coord, first, end);
    return;
  }

  const auto load_keys = [&](int key, int stage) {
    const int left = keys - key;
    load_tile<kD, kTile, kThreads>(k_tiles + stage * kTile * kD, coord.k_row(args.k, coord.kv_head, key),
                                   args.k.row, left, args.dim);
    load_tile<kD, kTile, kThreads>(v_tiles + stage * kTile * kD, coord.k_row(args.v, coord.kv_head, key),
                                   args.v.row, left, args.dim);
  };
  load_keys(first, 0);
  load_queries<T, kD, kRows>(args, coord, stride, q_tile, dout_tile);
  gpu::cp_async_commit();
  make_statistics<T, kRows>(args, coord, stride, lse2, delta);

  [[maybe_unused]] uint32_t stream = 0;
  [[maybe_unused]] uint32_t head_row = 0,
                            query_block =
                                0;  // row of the head and first query of this lane's block of 16 rows
  if constexpr (kDrops) {
    stream = args.drop.stream();
    const int member = min(lane / 8 * 16 / stride, args.group - 1);
    head_row = coord.drop_row(args, coord.head + member);
    query_block = uint32_t(lane / 8 * 16 % stride / 16);
  }
  float dq[2 * Tile::kColumns][4] = {};

#pragma unroll 1
  for (int key = first, stage = 0; key < end; key += kTile, stage ^= 1) {
    const int thread = gpu::reread_thread();
    const int lane = thread % 32, warp_row = thread / 32 * 16;
    gpu::cp_async_wait<0>();
    __syncthreads();  // the tile has landed, and no warp still reads the other stage or dS
    if (key + kTile < end) {
      load_keys(key + kTile, stage ^ 1);
      gpu::cp_async_commit();
    }
    T* const k_tile = k_tiles + stage * kTile * kD;
    T* const v_tile = v_tiles + stage * kTile * kD;
    uint32_t p[1][kRows / 16][4], ds[1][kRows / 16][4];
    {
      float s[1][kRows / 8][4] = {}, dp[1][kRows / 8][4] = {};  // [keys, rows]
      gemm_abt<T>(s, RowOperand<kD, 1, false>(k_tile, warp_row), q_tile, 0);
      gemm_abt<T>(dp, RowOperand<kD, 1, false>(v_tile, warp_row), dout_tile, 0);
      if (key + kTile > keys || (args.causal && key + kTile > keys - queries)) {
#pragma unroll
        for (int n = 0; n < kRows / 8; ++n)
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            const int own_key = key + warp_row + e / 2 * 8 + lane / 4;
            const int i = (n * 8 + lane % 4 * 2 + e % 2) % stride;
            if (own_key >= keys || coord.is_masked(args.causal, i, own_key)) s[0][n][e] = -INFINITY;
          }
      }
      [[maybe_unused]] uint32_t word = 0;  // keep bits of the warp's 16 keys and a block of 16 rows
      if constexpr (kDrops)
        word = args.drop.word(stream, head_row, query_block, uint32_t((key + warp_row) / 2 + lane % 8));
#pragma unroll
      for (int n = 0; n < kRows / 8; ++n) {
        const int column = n * 8 + lane % 4 * 2;
        const float2 row_lse2 = *reinterpret_cast<const float2*>(lse2 + column);
        const float2 row_delta = *reinterpret_cast<const float2*>(delta + column);
        [[maybe_unused]] ColumnBits bits;
        if constexpr (kDrops) bits = {word, n / 2 * 8, lane};
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float own =
              gpu::exp2_approx(fmaf(s[0][n][e], args.scale2, -(e % 2 ? row_lse2.y : row_lse2.x)));
          const float own_delta = e % 2 ? row_delta.y : row_delta.x;
          if constexpr (kDrops) {
            s[0][n][e] = bits.drop(own, n % 2, e);
            dp[0][n][e] = fmaf(s[0][n][e], dp[0][n][e], -own * own_delta);
          } else {
            s[0][n][e] = own;
            dp[0][n][e] = own * (dp[0][n][e] - own_delta);
          }
        }
      }
      to_operand<T>(p, s);
      to_operand<T>(ds, dp);
    }
    if (few.queries) {
#pragma unroll
      for (int k = 0; k < kRows / 16; ++k)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          *reinterpret_cast<uint32_t*>(
              ds_tile + tile_offset<kRows>(warp_row + i % 2 * 8 + lane / 4, 2 * k + i / 2) + lane % 4 * 2) =
              ds[0][k][i];
    }
    if (few.keys) {  // dK and dV are stored through the warp's own rows of V
      float sum[1][kD / 8][4] = {}, factor[1][2];
      factor[0][0] = factor[0][1] = kDrops ? args.drop.scale : 1.0f;
      gemm_ab<T, kD>(sum, p, dout_tile, 0);
      store_rows<kD>(sum, factor, v_tile, warp_row, coord.k_row(args.dv, coord.kv_head, key), args.dv.row,
                     keys - key, args.dim);
#pragma unroll
      for (auto& columns : sum[0])
        for (float& element : columns) element = 0;
      factor[0][0] = factor[0][1] = coord.grad_scale<kDrops>(args);
      gemm_ab<T, kD>(sum, ds, q_tile, 0);
      store_rows<kD>(sum, factor, v_tile, warp_row, coord.k_row(args.dk, coord.kv_head, key), args.dk.row,
                     keys - key, args.dim);
    }
    if (few.queries) {
      __syncthreads();
      add_queries<T, kD, kRows>(dq, ds_tile, k_tile, thread, lane);
    }
  }

  if (few.queries) store_queries<T, kD, kRows, kDrops>(few, coord, stride, dq);
}

/// Adds the partial dQ of the ranges: one block per query, four elements per thread; where threads remain,
/// several of them share the ranges of an element.
template <class T>
__global__ void __launch_bounds__(kThreads)
    attention_backward_few_finish_kernel(const __grid_constant__ FewArgs<T> few) {
  __shared__ float4 sums[kThreads];
  const AttentionArgs<T>& args = few.attention;
  gpu::wait_and_launch_dependents();
  const int h = int(blockIdx.x % unsigned(args.heads));
  const int64_t q_row = blockIdx.x / unsigned(args.heads);  // over all batch elements
  int b = 0;
  AttentionSequence sequence{0, 0, args.queries, 0, args.keys, 0, true};
  if (args.seqlens.packed()) {  // the last sequence that starts at or before the row
    unsigned found = 0;
    for (int s = int(threadIdx.x) % 32; s <= args.seqlens.count; s += 32)
      if (args.seqlens.start(args.seqlens.q, args.seqlens.q_rows, s) <= q_row) found = unsigned(s);
    sequence = args.seqlens.template sequence<true>(int(__reduce_max_sync(0xFFFFFFFFu, found)), 0, 1);
  } else {
    b = int(q_row / args.queries);
  }
  const int i = int(args.seqlens.packed() ? q_row - sequence.q_first : q_row % args.queries);
  const int count = int(gpu::ceil_div(sequence.keys, few.range));
  const int slot = args.seqlens.packed() ? sequence.k_first / few.range + sequence.index : 0;
  const int row = h % args.group * FewArgs<T>::stride(sequence.queries, few.drops) + i;
  const int lanes = args.dim / 4, ways = kThreads / lanes;
  const int rank = int(threadIdx.x) % lanes, way = int(threadIdx.x) / lanes;
  const int64_t head = int64_t(b) * args.kv_heads + h / args.group;
  const float4* const from =
      reinterpret_cast<const float4*>(few.partial + ((head * few.slots + slot) * few.rows + row) * args.dim) +
      rank;
  float4 sum = {};
  if (way < ways) {
#pragma unroll 8
    for (int n = way; n < count; n += ways) {
      const float4 part = from[int64_t(n) * few.rows * lanes];
      sum.x += part.x, sum.y += part.y, sum.z += part.z, sum.w += part.w;
    }
  }
  sums[threadIdx.x] = sum;
  __syncthreads();
  if (way != 0) return;
  for (int other = 1; other < min(ways, count); ++other) {
    const float4 part = sums[other * lanes + rank];
    sum.x += part.x, sum.y += part.y, sum.z += part.z, sum.w += part.w;
  }
  const float last = sequence.keys == 1 ? 0.0f : args.scale * args.drop.scale;
  const int64_t at = args.seqlens.packed() ? q_row : i;
  gpu::store_pack<4>(args.dq.at(b, h, at) + rank * 4,
                     gpu::Pack<T, 4>{T(sum.x * last), T(sum.y * last), T(sum.z * last), T(sum.w * last)});
}

/// Chooses the keys per block: the fewest waves of blocks, `blocks` per SM, times the time of a block in
/// tiles, its prologue and epilogue counting as two. For packed sequences, whose lengths are not known: two
/// full waves.
int keys_of_block(const CuSeqlens& seqlens, int64_t heads, int64_t keys, int blocks, int sms) {
  const int64_t at_once = sms * int64_t(blocks), tiles = gpu::ceil_div(keys, kTile);
  if (seqlens.packed()) return kTile * int(std::max<int64_t>(1, gpu::ceil_div(heads * tiles, 2 * at_once)));
  int64_t best = tiles, least = INT64_MAX;
  for (int64_t ranges = 1; ranges <= std::min(tiles, at_once); ++ranges) {
    const int64_t own = gpu::ceil_div(tiles, ranges);
    const int64_t time = gpu::ceil_div(heads * gpu::ceil_div(tiles, own), at_once) * (own + 2);
    if (time < least) {
      least = time;
      best = own;
    }
  }
  return kTile * int(best);
}

template <class T, int kD, int kRows, bool kDrops>
void run(const Tensor& q, const Tensor& k, FewArgs<T> few) {
  using Tile = FewTile<kD, kRows>;
  const Device device = q.device();
  const AttentionArgs<T>& args = few.attention;
  const int64_t heads = k.size(0) * k.size(2);
  few.range = keys_of_block(args.seqlens, heads, k.size(1), Tile::kBlocks, device.multiprocessors());
  few.slots = args.seqlens.slots(k.size(1), few.range);
  check(heads * few.slots <= int64_t{0x7FFFFFFF} && q.size(0) * q.size(1) * q.size(2) <= int64_t{0x7FFFFFFF},
        "attention: ", describe(q), " needs more than 2^31 - 1 blocks (split the batch)");
  Tensor partial;
  const bool adds = few.queries && (args.seqlens.packed() || few.slots != 1);
  if (adds) {
    partial = Tensor::empty_packed({heads * few.slots * few.rows, args.dim}, DType::f32, device);
    few.partial = partial.data<float>();
  }
  gpu::launch_dependent(device, {dim3(unsigned(heads * few.slots)), dim3(kThreads), Tile::kBytes},
                        attention_backward_few_kernel<T, kD, kRows, kDrops>, few);
  if (adds)
    gpu::launch_dependent(device, {dim3(unsigned(q.size(0) * q.size(1) * q.size(2))), dim3(kThreads)},
                          attention_backward_few_finish_kernel<T>, few);
}

}  // namespace

void attention_backward_few_cuda(const Tensor& dq, const Tensor& dk, const Tensor& dv, const Tensor& dout,
                                 const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& o,
                                 const Tensor& lse, const AttentionProblem& problem) {
  dispatch_floating_cuda(q.dtype(), "attention", [&]<class T>() {
    if constexpr (!std::is_same_v<T, float>) {
      FewArgs<T> few{attention_args<T>(lse, q, k, v, problem)};
      AttentionArgs<T>& args = few.attention;
      args.o = const_head_rows<T>(o);
      args.dout = const_head_rows<T>(dout);
      few.drops = args.drop.drops();
      few.queries = dq.defined();
      few.keys = dk.defined();
      if (dq.defined()) args.dq = head_rows<T>(dq);
      if (dk.defined()) {
        args.dk = head_rows<T>(dk);
        args.dv = head_rows<T>(dv);
      }
      few.rows = args.group * FewArgs<T>::stride(args.queries, few.drops);
      dispatch_head_size(q.size(3), args.drop, [&]<int kD, bool kDrops>() {
        if (few.rows <= 32) return run<T, kD, 32, kDrops>(q, k, few);
        run<T, kD, 64, kDrops>(q, k, few);
      });
    }
  });
}

}  // namespace tessera::ops
