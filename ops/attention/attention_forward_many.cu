#include <algorithm>

#include "gpu/approx.cuh"
#include "gpu/dependent_launch.cuh"
#include "ops/attention/attention_device.cuh"
#include "ops/attention/attention_tile.cuh"
#include "ops/attention/attention_variants.h"

/// Forward of many short sequences in many heads, with mma.sync: a tile of 128 or 192 queries would be nearly
/// empty, and a block would spend its time on its prologue and epilogue.
///
/// A warp owns a tile of 16 queries and processes one head after the other; it shares nothing with the other
/// warps of the block, which process other heads of the same sequence. So one search for the sequence serves
/// several heads, no warp waits for another, and while a warp processes a tile of keys, cp.async loads its
/// next one, or that of the next head. Rows past the end of a sequence are not copied. The softmax is online,
/// in base 2; the probabilities, rounded to the dtype, are the left operand of P V directly from the
/// accumulators.
///
/// Bytes: Q and O once, K and V once per query tile (from L2 where heads share keys or a sequence has several
/// tiles). Bound by these bytes; with few rows per tile by its instructions.

namespace tessera::ops {
namespace {

constexpr int kWarps = 4, kThreads = kWarps * 32;
constexpr int kRows = 16, kKeys = 16;  // rows of a tile of queries, of keys

/// By the head size in shared memory, 64 or 128.
template <int kD>
struct ManyTile {
  // Two tiles each of Q, K and V per warp.
  static constexpr int kWarpElements = 2 * (kRows + 2 * kKeys) * kD;
  static constexpr size_t kSharedBytes = size_t(kWarps) * kWarpElements * 2;
  static constexpr int kBlocks = kD == 64 ? 4 : 2;  // blocks per SM
};

/// A warp: starts the copy of `rows` rows (at most 16) to a tile; with kZeros the others become zeros,
/// columns from `dim` on always do.
template <int kD, bool kZeros, class T>
__device__ __forceinline__ void copy_rows(T* tile, const T* from, int64_t stride, int rows, int dim) {
  constexpr int kChunks = kD / 8, kStep = 32 / kChunks;  // rows at a time
  const int lane = int(threadIdx.x) % 32, row = lane / kChunks, chunk = lane % kChunks;
  const uint32_t to = gpu::shared_address(tile) + 2 * uint32_t(tile_offset<kD>(row, chunk));
  const T* source = from + row * stride + chunk * 8;
#pragma unroll
  for (int i = 0; i < kRows / kStep; ++i) {
    if (!kZeros && i * kStep >= rows) break;
    const bool valid = row + i * kStep < rows && chunk * 8 < dim;
    gpu::cp_async_16((to ^ uint32_t(i * kStep % 8 * 16)) + 2 * uint32_t(i * kStep * kD),
                     valid ? source : from, valid);
    source += kStep * stride;
  }
}

template <class T, int kD>
__global__ void __launch_bounds__(kThreads, ManyTile<kD>::kBlocks)
    attention_forward_many_kernel(AttentionArgs<T> args, int chunks, int chunk_heads) {
  using Tile = ManyTile<kD>;
  gpu::wait_and_launch_dependents();
  extern __shared__ __align__(1024) uint4 shared[];
  const int warp = int(threadIdx.x) / 32, lane = int(threadIdx.x) % 32;
  T* const q_tiles = reinterpret_cast<T*>(shared) + warp * Tile::kWarpElements;
  T* const k_tiles = q_tiles + 2 * kRows * kD;
  T* const v_tiles = k_tiles + 2 * kKeys * kD;

  const unsigned slots =
      unsigned(args.seqlens.slots(args.seqlens.packed() ? args.seqlens.q_rows : args.queries, kRows));
  const unsigned chunk = blockIdx.x % unsigned(chunks), tile_index = blockIdx.x / unsigned(chunks);
  AttentionCoord coord;
  coord.b = int(tile_index / slots);
  coord.sequence = {0, 0, args.queries, 0, args.keys, int(tile_index % slots), true};
  if (args.seqlens.packed())
    coord.sequence = args.seqlens.template find<true>(int(tile_index % slots), kRows);
  if (!coord.sequence.has_tile) return;
  const int first = coord.sequence.tile * kRows, rows = min(coord.sequence.queries - first, kRows);
  // Every query sees the first `unmasked` keys; none sees key `end` or a later one.
  const int unmasked = coord.key_limit(args.causal, first),
            end = coord.key_limit(args.causal, first + rows - 1);
  const int tiles = max(1, int(gpu::ceil_div(end, kKeys)));
  const int last_head = min(args.heads, int(chunk + 1) * chunk_heads);

  // The next load: a tile of keys and, with the first one of a head, the head's queries.
  int next_head = int(chunk) * chunk_heads + warp, next_tile = 0, q_turn = 0, turn = 0;
  const auto issue_load = [&] {
    if (next_head < last_head) {
      const int kv_head = next_head / args.group, key = next_tile * kKeys;
      if (next_tile == 0) {
        copy_rows<kD, false>(q_tiles + q_turn * kRows * kD, coord.q_row(args.q, next_head, first), args.q.row,
                             end > 0 ? rows : 0, args.dim);
        q_turn ^= 1;
      }
      const int keys = max(0, min(end - key, kKeys));
      copy_rows<kD, false>(k_tiles + turn * kKeys * kD, coord.k_row(args.k, kv_head, key), args.k.row, keys,
                           args.dim);
      copy_rows<kD, true>(v_tiles + turn * kKeys * kD, coord.k_row(args.v, kv_head, key), args.v.row, keys,
                          args.dim);
      turn ^= 1;
      if (++next_tile == tiles) {
        next_tile = 0;
        next_head += kWarps;
      }
    }
    gpu::cp_async_commit();
  };
  issue_load();
  int used = 0, q_used = 0;
  for (int head = int(chunk) * chunk_heads + warp; head < last_head; head += kWarps) {
    T* const q_tile = q_tiles + q_used * kRows * kD;
    q_used ^= 1;
    RowOperand<kD, 1, true> q(q_tile, 0);
    float o[1][kD / 8][4] = {};
    float top[2] = {-INFINITY, -INFINITY}, sum[2] = {0, 0};  // of rows lane / 4 and lane / 4 + 8
    for (int tile = 0; tile < tiles; ++tile) {
      __syncwarp();  // no lane still reads the tile that is overwritten
      issue_load();
      gpu::cp_async_wait<1>();
      __syncwarp();
      if (tile == 0) q.load_fragments();
      const int stage = used * kKeys * kD;
      used ^= 1;
      float s[1][kKeys / 8][4] = {};
      gemm_abt<T>(s, q, k_tiles + stage, 0);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if ((tile + 1) * kKeys > unmasked) {
          const int seen =
              coord.key_limit(args.causal, first + half * 8 + lane / 4) - tile * kKeys - lane % 4 * 2;
#pragma unroll
          for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
            for (int e = 0; e < 2; ++e)
              if (8 * n + e >= seen) s[0][n][2 * half + e] = -INFINITY;
        }
        float highest = top[half];
#pragma unroll
        for (int n = 0; n < kKeys / 8; ++n)
          highest = fmaxf(highest, fmaxf(s[0][n][2 * half], s[0][n][2 * half + 1]));
        highest = fmaxf(highest, __shfl_xor_sync(0xFFFFFFFFu, highest, 1));
        highest = fmaxf(highest, __shfl_xor_sync(0xFFFFFFFFu, highest, 2));
        // No key seen yet: any finite base serves; -inf - -inf would be NaN.
        const float base = highest == -INFINITY ? 0.0f : highest * args.scale2;
        const float rescale = gpu::exp2_approx(top[half] * args.scale2 - base);
        top[half] = highest;
        float added = 0;  // of this thread's columns
#pragma unroll
        for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
          for (int e = 2 * half; e < 2 * half + 2; ++e) {
            s[0][n][e] = gpu::exp2_approx(fmaf(s[0][n][e], args.scale2, -base));
            added += s[0][n][e];
          }
        sum[half] = sum[half] * rescale + added;
        if (tile == 0) continue;
#pragma unroll
        for (int n = 0; n < kD / 8; ++n) {
          o[0][n][2 * half] *= rescale;
          o[0][n][2 * half + 1] *= rescale;
        }
      }
      uint32_t p[1][kKeys / 16][4];
      to_operand<T>(p, s);
      gemm_ab<T, kD>(o, p, v_tiles + stage, 0);
    }
    float inverse[1][2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float total = sum[half];
      total += __shfl_xor_sync(0xFFFFFFFFu, total, 1);
      total += __shfl_xor_sync(0xFFFFFFFFu, total, 2);
      inverse[0][half] = total == 0 ? 0.0f : 1 / total;
      const int row = half * 8 + lane / 4;
      if (lane % 4 == 0 && row < rows)
        args.lse[(int64_t(coord.b) * args.heads + head) * args.lse_stride + coord.sequence.q_first + first +
                 row] = total == 0 ? -INFINITY : top[half] * args.scale + logf(total);
    }
    store_rows<kD>(o, inverse, q_tile, 0, coord.q_row(args.out, head, first), args.out.row, rows, args.dim);
  }
}

template <class T, int kD>
void launch_many(const Tensor& q, const AttentionArgs<T>& args) {
  const int64_t tiles = args.seqlens.slots(q.size(1), kRows) * q.size(0);
  // As many heads per warp, at most eight, as still make four times the blocks that fill the GPU; about half
  // of the slots of packed sequences are empty.
  const int64_t full = gpu::ceil_div(q.size(1), kRows) * q.size(0) + args.seqlens.count / 2;
  const int64_t heads =
      std::clamp<int64_t>(full * args.heads / (int64_t(q.device().multiprocessors()) * 16 * kWarps), 1, 8);
  const int64_t chunk_heads = kWarps * heads, chunks = gpu::ceil_div(args.heads, chunk_heads);
  check(tiles * chunks <= int64_t{0x7FFFFFFF}, "attention: ", describe(q), " needs ", tiles * chunks,
        " blocks; expected at most 2^31 - 1 (split the batch)");
  gpu::launch_dependent(q.device(),
                        {dim3(unsigned(tiles * chunks)), dim3(kThreads), ManyTile<kD>::kSharedBytes},
                        attention_forward_many_kernel<T, kD>, args, int(chunks), int(chunk_heads));
}

}  // namespace

void attention_forward_many_cuda(const Tensor& o, const Tensor& lse, const Tensor& q, const Tensor& k,
                                 const Tensor& v, const AttentionProblem& problem) {
  dispatch_floating_cuda(q.dtype(), "attention", [&]<class T>() {
    if constexpr (!std::is_same_v<T, float>) {
      AttentionArgs<T> args = attention_args<T>(lse, q, k, v, problem);
      args.out = head_rows<T>(o);
      if (q.size(3) <= 64) return launch_many<T, 64>(q, args);
      launch_many<T, 128>(q, args);
    }
  });
}

}  // namespace tessera::ops
