#pragma once

#include "gpu/global.cuh"
#include "gpu/pack.cuh"
#include "gpu/tma.cuh"
#include "gpu/wgmma.cuh"
#include "ops/gemm/gemm_sm90_plan.h"
#include "ops/swiglu/swiglu_math.h"

/// Skinny GEMM on sm_90a: y = W x for up to 64 tokens, 16-bit operands. 2 T FLOP per weight of 2 bytes: bound
/// by reading W once from memory, 4.3 TB/s on an H200. What counts is (1) that enough bytes are in flight,
/// some 60 KiB per SM, (2) that all SMs finish at the same time, (3) that L2 delivers x next to W: every SM
/// reads x again for each of its tiles.
///
/// Operands are swapped, so that the weights are the M side of wgmma and the tokens its N, 16 ... 64: the
/// tensor cores waste nothing on missing tokens, and a tile of W may have any number of rows, because rows
/// past its end cost instructions but no bytes. So W is cut into tiles of equal numbers of rows, one per
/// thread block or per cluster: no SM has more to read than another. One producer thread streams W and x by
/// TMA through a ring in shared memory, 64 of k per stage; one warpgroup multiplies.
///
/// Split-K: where W has too few rows for tiles that are large compared to x, the thread blocks of a cluster
/// share a tile and divide its k. Each leaves its partial sums in its shared memory, and each adds those of
/// all, in the order of k, for its share of the rows. The blocks of a cluster are co-scheduled: none waits
/// for a block that may not run.
///
/// PDL: thread blocks start before the previous kernel ends, and prefetch their first stages of W into L2,
/// which is safe even if that kernel still writes W.

namespace tessera::ops {
namespace {

constexpr int kStreamThreads = 160;  // one MMA warpgroup, one producer warp
constexpr int kMostStreamStages = 24;
/// Shared memory of pipeline and epilogue: half an SM, so that the blocks of the next kernel are resident,
/// and their first tiles in L2, before this kernel ends; or, if that gave fewer stages than kFewestStages,
/// all of it.
constexpr int kStreamShared = 111 * 1024, kStreamSharedAlone = 225 * 1024, kFewestStages = 6;
constexpr int kMBlocks = int(kStreamRows) / 64;  // MMAs of 64 rows per tile

template <class T>
struct StreamArgs {
  void* y;
  const void* c;                     // added, times beta; laid out as y
  const T* bias;                     // or null
  int64_t y_row, y_token, y_matrix;  // strides of y, in elements: of W's rows, of tokens, of the batch
  int64_t bias_row, bias_token, bias_matrix;  // of bias
  int rows, tokens;                           // gated: rows of the gate, that is of y
  int tile, tiles, all_tiles;                 // rows per tile; tiles per matrix, of the batch
  int blocks, splits, depth;                  // k-blocks of 64; thread blocks per cluster; k-blocks of each
  int stages, stage_bytes, weight_bytes;      // of the ring; weight_bytes: the offset of x in a stage
  int loaded_bytes;                           // per stage
  int batched_weights, batched_tokens;        // 0: the same matrix for the whole batch
  float alpha, beta;
  bool wide;  // y is f32, not T
};

struct StreamRing {
  gpu::Barrier full[kMostStreamStages], empty[kMostStreamStages];
};

/// kTokens: N of the MMA. kOrder: layout of W. kGated: W has the rows of the gate, then those of up, and a
/// tile has as many of each; y = silu(gate) up.
template <class T, int kTokens, gpu::TileOrder kOrder, bool kGated>
class StreamKernel {
  static constexpr int kAcross = kTokens / 8, kHalves = kGated ? 2 : 1;
  static constexpr int kStagedPitch = 68;  // floats: what a warp writes together is in different banks
  static constexpr int kStagedPart = kTokens * kStagedPitch;
  static_assert(!kGated || kOrder == gpu::TileOrder::k_major);

 public:
  /// Shared memory of the epilogue: 64 rows (of gate and up); with split-K the whole tile, in place of the
  /// stages.
  static constexpr int kStagedBytes = kHalves * kStagedPart * 4, kPartialBytes = kMBlocks * kStagedPart * 4;

  __device__ __forceinline__ StreamKernel(const StreamArgs<T>& args, char* ring_memory, StreamRing& barriers)
      : g(args), stages(ring_memory), ring(barriers) {
    const int cluster = int(blockIdx.x) / g.splits, rank = int(blockIdx.x) - cluster * g.splits;
    first_tile = cluster, step = int(gridDim.x) / g.splits;
    first = min(rank * g.depth, g.blocks), count = min(g.depth, g.blocks - first);
    this->rank = rank;
  }

  /// Producer: one thread.
  __device__ __forceinline__ void produce(const gpu::TensorMap& weights, const gpu::TensorMap& tokens) const {
    const uint64_t once = gpu::evict_first(), often = gpu::evict_last();
    if (first_tile < g.all_tiles)
      for (int block = 0; block < min(count, g.stages); ++block)
        for_each_weight_box(
            first_tile, [&](int, int c0, int c1, int c2) { gpu::tma_prefetch(weights, c0, c1, c2); },
            (first + block) * 64);
    gpu::grid_dependency_wait();
    int stage = 0;
    uint32_t parity = 1;
    for (int tile = first_tile; tile < g.all_tiles; tile += step)
      for (int block = 0; block < count; ++block) {
        const int k = (first + block) * 64;
        char* const to = stages + stage * g.stage_bytes;
        gpu::Barrier& full = ring.full[stage];
        ring.empty[stage].wait(parity);
        full.arrive_expect(uint32_t(g.loaded_bytes));
        for_each_weight_box(
            tile,
            [&](int at, int c0, int c1, int c2) { gpu::tma_load(to + at, weights, full, once, c0, c1, c2); },
            k);
        gpu::tma_load(to + g.weight_bytes, tokens, full, often, k, 0, tile / g.tiles * g.batched_tokens);
        if (++stage == g.stages) stage = 0, parity ^= 1;
      }
  }

  /// Consumer warpgroup. `staged`: kStagedBytes of shared memory for the epilogue.
  __device__ __forceinline__ void consume(float* staged) const {
    int stage = 0;
    uint32_t parity = 0;
    for (int tile = first_tile; tile < g.all_tiles; tile += step) {
      float sums[kMBlocks][kTokens / 2];  // (64 kMBlocks, kTokens)
      int before = 0;
      for (int block = 0; block < count; ++block) {
        ring.full[stage].wait(parity);
        const uint32_t from = gpu::shared_address(stages) + uint32_t(stage * g.stage_bytes);
        const uint64_t x = gpu::tile_descriptor<gpu::TileOrder::k_major>(from + uint32_t(g.weight_bytes));
#pragma unroll
        for (int m_block = 0; m_block < kMBlocks; ++m_block) gpu::warpgroup_fence_operand(sums[m_block]);
        gpu::warpgroup_arrive();
#pragma unroll
        for (int step = 0; step < 4; ++step)
#pragma unroll
          for (int m_block = 0; m_block < kMBlocks; ++m_block) {
            const uint32_t rows = kGated && m_block >= kMBlocks / 2
                                      ? uint32_t(g.weight_bytes / 2 + (m_block - kMBlocks / 2) * 8192)
                                      : uint32_t(m_block * 8192);
            gpu::wgmma<T, kOrder, gpu::TileOrder::k_major>(
                sums[m_block],
                gpu::tile_descriptor<kOrder>(from + rows, 8192) + step * gpu::kDescriptorStep<kOrder>,
                x + step * gpu::kDescriptorStep<gpu::TileOrder::k_major>, block | step);
          }
        gpu::warpgroup_commit();
        gpu::warpgroup_wait<1>();
        if (block > 0 && threadIdx.x % 32 == 0) ring.empty[before].arrive();
        before = stage;
        if (++stage == g.stages) stage = 0, parity ^= 1;
      }
      gpu::warpgroup_wait<0>();
#pragma unroll
      for (int m_block = 0; m_block < kMBlocks; ++m_block) gpu::warpgroup_fence_operand(sums[m_block]);
      if (count > 0 && threadIdx.x % 32 == 0) ring.empty[before].arrive();
      if (g.splits == 1)
        store_tile(tile, sums, staged);
      else
        reduce_and_store(tile, sums);
    }
  }

 private:
  /// Calls `one` for each box of W of a stage: where it goes, and its coordinates.
  template <class One>
  __device__ __forceinline__ void for_each_weight_box(int tile_index, One&& one, int k) const {
    const int matrix = tile_index / g.tiles, row = (tile_index - matrix * g.tiles) * g.tile,
              z = matrix * g.batched_weights;
    if constexpr (kOrder == gpu::TileOrder::k_major) {
      one(0, k, row, z);
      if constexpr (kGated) one(g.weight_bytes / 2, k, g.rows + row, z);
    } else {
      for (int box = 0; box < g.tile / 64; ++box) one(box * 8192, row + box * 64, k, z);
    }
  }

  /// Writes the accumulators of one MMA to shared memory, (kTokens, 64). Warp w has rows 16 w ...
  /// (gpu/wgmma.cuh).
  static __device__ __forceinline__ void stage_accumulators(float* to, const float (&sums)[kTokens / 2]) {
    const int lane = int(threadIdx.x) % 32, row = int(threadIdx.x) / 32 * 16 + lane / 4;
    to += lane % 4 * 2 * kStagedPitch + row;
#pragma unroll
    for (int across = 0; across < kAcross; ++across) {
      float* const at = to + across * 8 * kStagedPitch;
      at[0] = sums[across * 4], at[kStagedPitch] = sums[across * 4 + 1];
      at[8] = sums[across * 4 + 2], at[kStagedPitch + 8] = sums[across * 4 + 3];
    }
  }

  /// Epilogue of a tile that is not split: 64 rows at a time through shared memory.
  __device__ __forceinline__ void store_tile(int tile, const float (&sums)[kMBlocks][kTokens / 2],
                                             float* staged) const {
#pragma unroll
    for (int m_block = 0; m_block < kMBlocks / kHalves; ++m_block) {
#pragma unroll
      for (int half = 0; half < kHalves; ++half)
        stage_accumulators(staged + half * kStagedPart, sums[half * (kMBlocks / kHalves) + m_block]);
      gpu::sync_named(1, 128);
      const int row = int(threadIdx.x) % 64;
#pragma unroll 4
      for (int t = int(threadIdx.x) / 64; t < min(kTokens, g.tokens); t += 2) {
        const float* const at = staged + t * kStagedPitch + row;
        store(tile, m_block * 64 + row, t, at[0], at[(kHalves - 1) * kStagedPart]);
      }
      gpu::sync_named(1, 128);
    }
  }

  /// Epilogue of a tile that the cluster shares: partial sums are reduced through distributed shared memory.
  /// It is the only tile of this thread block, whose stages are free: all MMAs have completed.
  __device__ __forceinline__ void reduce_and_store(int tile, float (&sums)[kMBlocks][kTokens / 2]) const {
    float* const staged = reinterpret_cast<float*>(stages);
    gpu::sync_named(1, 128);  // all four warps have waited for their MMAs
#pragma unroll
    for (int m_block = 0; m_block < kMBlocks; ++m_block) {
      if (count == 0)
#pragma unroll
        for (int i = 0; i < kTokens / 2; ++i) sums[m_block][i] = 0;
      stage_accumulators(staged + m_block * kStagedPart, sums[m_block]);
    }
    gpu::cluster_sync();
    const int share = (g.tile + g.splits - 1) / g.splits, begin = rank * share,
              rows = min(share, g.tile - begin), all = rows * min(kTokens, g.tokens);
#pragma unroll 2
    for (int i = int(threadIdx.x); i < all; i += 128) {
      const int t = i / rows, row = begin + i - t * rows;
      const uint32_t at = gpu::shared_address(staged + row / 64 * kStagedPart + t * kStagedPitch + row % 64);
      float sum = 0, up = 0;
#pragma unroll 4
      for (int other = 0; other < g.splits; ++other) {
        sum += gpu::load_cluster(gpu::cluster_address(at, uint32_t(other)));
        if (kGated)
          up += gpu::load_cluster(gpu::cluster_address(at + kMBlocks / 2 * kStagedPart * 4, uint32_t(other)));
      }
      store(tile, row, t, sum, up);
    }
  }

  /// Writes one element of y.
  __device__ __forceinline__ void store(int tile_index, int in_tile, int t, float sum, float up) const {
    const int matrix = tile_index / g.tiles, row = (tile_index - matrix * g.tiles) * g.tile + in_tile;
    if (in_tile >= g.tile || row >= g.rows) return;
    const int64_t to = matrix * g.y_matrix + row * g.y_row + t * g.y_token;
    float value = kGated ? swiglu_value(sum, up) : g.alpha * sum;
    if (!kGated && g.bias)
      value += float(g.bias[matrix * g.bias_matrix + row * g.bias_row + t * g.bias_token]);
    if (!kGated && g.beta != 0)
      value += g.beta * (g.wide ? static_cast<const float*>(g.c)[to] : float(static_cast<const T*>(g.c)[to]));
    if (g.wide)
      static_cast<float*>(g.y)[to] = value;
    else
      static_cast<T*>(g.y)[to] = T(value);
  }

  const StreamArgs<T>& g;
  char* const stages;
  StreamRing& ring;
  int rank, first_tile, step, first, count;  // tiles of this cluster; k-blocks of this thread block
};

template <class T, int kTokens, gpu::TileOrder kOrder, bool kGated>
__global__ void __launch_bounds__(kStreamThreads, 2)
    stream_kernel(const __grid_constant__ gpu::TensorMap weights,
                  const __grid_constant__ gpu::TensorMap tokens, const __grid_constant__ StreamArgs<T> g) {
  using Kernel = StreamKernel<T, kTokens, kOrder, kGated>;
  extern __shared__ __align__(1024) char stages[];
  __shared__ StreamRing ring;
  __shared__ float staged[Kernel::kStagedBytes / 4];
  gpu::launch_dependents();
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < g.stages; ++stage) {
      ring.full[stage].init(1);
      ring.empty[stage].init(4);
    }
    gpu::fence_barrier_init();
    gpu::prefetch_map(tokens);
  }
  __syncthreads();
  const Kernel kernel(g, stages, ring);
  if (gpu::uniform(int(threadIdx.x) / 32) == 4) {
    if (gpu::elect_one()) kernel.produce(weights, tokens);
    __syncwarp();
    gpu::grid_dependency_wait();
    if (g.splits > 1) gpu::cluster_sync();
  } else {
    gpu::grid_dependency_wait();
    kernel.consume(staged);
  }
  if (g.splits > 1) gpu::cluster_sync();  // the others have read this thread block's sums
}

}  // namespace
}  // namespace tessera::ops
