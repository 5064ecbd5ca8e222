#pragma once

#include "gpu/barrier.cuh"
#include "gpu/global.cuh"
#include "gpu/mma.cuh"
#include "gpu/reread.cuh"
#include "gpu/wgmma.cuh"
#include "ops/gemm/gemm_sm90_plan.h"

/// Bias gradients: the GEMM of a weight gradient, dy^T x, also sums the rows of a over k. The bytes are in
/// shared memory already and the warps wait for their MMAs anyway, so they add what is there: for 64 of k and
/// 64 rows 4 loads of 512 bytes and 64 instructions per warp. (Multiplying by ones with mma.sync stalls the
/// warpgroups' WGMMA: docs/ops/linear.md.)
///
/// The tiles of a tile row all have the same a; up to four of them take the k-blocks alternately, counted
/// from the start of k, not of a split, since some of these tiles may be split and others not. The warp that
/// counts the last partial sum adds all of them, in the order of tiles and of k, so the result does not
/// depend on which warp it is.
///
/// Tile, Plan and WorkTile are those of gemm_sm90.cuh.

namespace tessera::ops {

/// Number of k-blocks, counted from block `first`, before the first one that tile `index` of `tiles` sums.
__device__ __forceinline__ int k_blocks_until_summed(int index, int tiles, int first) {
  const int blocks = index - first % tiles;
  return blocks < 0 ? blocks + tiles : blocks;
}

/// The sums of a over every `tiles`-th k-block. A lane holds those of rows g and g + 8 of its warp's 16 of
/// each 64 rows, over a quarter of k: g as in gpu/wgmma.cuh.
template <class Tile>
struct SumsOfA {
  int tiles, ahead;  // ahead: blocks before the next one to sum; larger than their number to sum none
  float sums[Tile::kMBlocks][2] = {};

  /// Called for each k-block in order.
  __device__ __forceinline__ void visit(const char* stage, int row) {
    if (--ahead >= 0) return;
    ahead = tiles - 1;
    const int lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) % 128 / 32;
    const uint32_t boxes = gpu::shared_address(stage) + uint32_t(row) * 128 +
                           gpu::swizzled_offset(lane / 16 * 8 + lane % 8, warp * 2 + lane / 8 % 2);
#pragma unroll
    for (int m_block = 0; m_block < Tile::kMBlocks; ++m_block)
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        uint32_t a[4];
        gpu::ldmatrix_x4_trans(a, boxes + uint32_t(m_block * 8192 + step * 16 * 128));
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float2 pair = gpu::unpack_halves<typename Tile::T>(a[i]);
          sums[m_block][i % 2] += pair.x, sums[m_block][i % 2] += pair.y;
        }
      }
  }
};

/// Number of partial sums that a work tile provides: a tile that is not split provides those of all splits,
/// all but the first zero.
template <class Plan, class WorkTile>
__device__ __forceinline__ int partial_sum_count(const Plan& plan, const WorkTile& work) {
  return work.splits == plan.splits ? 1 : plan.splits;
}

/// Writes the warpgroup's partial sums of a, for its rows of the tile, which begin at row `first` of d.
template <class Tile, class Plan, class WorkTile>
__device__ __forceinline__ void write_sums(const Plan& plan, const WorkTile& work, int first,
                                           const SumsOfA<Tile>& of_a) {
  const int lane = int(threadIdx.x) % 32, quad = lane % 4;
  float own = 0;  // each lane of the quad writes one of its sums
#pragma unroll
  for (int i = 0; i < 2 * Tile::kMBlocks; ++i) {
    float sum = of_a.sums[i / 2][i % 2];
    sum += __shfl_xor_sync(0xFFFFFFFFu, sum, 1);
    sum += __shfl_xor_sync(0xFFFFFFFFu, sum, 2);
    if (quad == i) own = sum;
  }
  const int row = first + int(threadIdx.x) % 128 / 32 * 16 + quad / 2 * 64 + lane / 4 + quad % 2 * 8;
  if (quad >= 2 * Tile::kMBlocks || first >= plan.m) return;
  const int index = work.n / Tile::kN * plan.splits + work.split, count = partial_sum_count(plan, work);
  float* to = plan.partial_sums + int64_t(index) * plan.sums_pitch + row;
  for (int i = 0; i < count; ++i, to += plan.sums_pitch) __stcg(to, i == 0 ? own : 0.0f);
}

/// Called by the producer warpgroup, by one otherwise idle warp per consumer warpgroup (`group`). Per work
/// tile that sums a: waits on named barrier kSumsBarrier + group until the warpgroup has written its partial
/// sums; adds their number to the arrival counter of the 64 rows; if that completes the count, adds all
/// partial sums and writes the result. Some 2 us to L2 and back, which the epilogue hides.
template <class Tile, class Plan>
__device__ __forceinline__ void reduce_sums(const Plan& plan, int group) {
  // Rows per lane, and its loads in flight together: it has 24 to 40 registers.
  constexpr int kRows = Tile::kRows / 32,
                kTogether = Tile::kManyAccumulators ? 1 : (Tile::kGroups == 3 ? 2 : 16) / kRows;
  using Rows = std::conditional_t<kRows == 4, float4, float2>;
  const int lane = int(threadIdx.x) % 32, parts = plan.template partial_sum_rows<Tile>();
  int number = 0;
  for (int item = int(blockIdx.x) / Tile::kCluster; item < plan.items;
       item += int(gridDim.x) / Tile::kCluster, ++number) {
    if (Tile::kPingPong && number % 2 != group) continue;
    const auto work =
        plan.template work_tile<Tile>(item, Tile::kCluster > 1 ? gpu::reread_cluster_rank() : 0);
    const int first = work.m + (Tile::kPingPong ? 0 : group * Tile::kRows);
    if (work.n / Tile::kN >= plan.template summing_tiles<Tile>()) continue;
    gpu::sync_named(Tile::kSumsBarrier + group, 160);
    if (first >= plan.m) continue;
    int arrived = 0;
    if (lane == 0) {
      int* const counter = plan.sums_arrived + first / 64;
      const int count = partial_sum_count(plan, work);
      arrived = gpu::atomic_add_acq_rel(counter, count);
      arrived += count;
      if (arrived == parts) *counter = 0;
    }
    if (__shfl_sync(0xFFFFFFFFu, arrived, 0) != parts) continue;
    __threadfence();
    const int row = first + lane * kRows;
    const float* from = plan.partial_sums + row;
    float sums[kRows] = {};
#pragma unroll kTogether
    for (int i = 0; i < parts; ++i, from += plan.sums_pitch) {
      const Rows some = __ldcg(reinterpret_cast<const Rows*>(from));
      sums[0] += some.x, sums[1] += some.y;
      if constexpr (kRows == 4) sums[2] += some.z, sums[3] += some.w;
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i)
      if (row + i < plan.m) plan.sums[row + i] = sums[i];
  }
}

}  // namespace tessera::ops
