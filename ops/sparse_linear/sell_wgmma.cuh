#pragma once

#include "gpu/tma.cuh"
#include "gpu/wgmma.cuh"
#include "ops/sparse_linear/sell_wgmma_decompress.cuh"

/// Up to kJointWeights sell_delta4 weights over the same x, with tensor cores: variant "sell_wgmma". Three
/// kernels: pack_inputs arranges x, multiply_tiles writes sums over some of the columns, add_splits adds them
/// and writes y.
///
/// A unit of work is two pairs of slices (128 rows) in a part of the columns. A block has consecutive units
/// for the same tokens, in the order of rows, columns; of rows that several blocks share each block writes a
/// sum of its own. Parts of more than 512 columns take several passes. Each pair has a tile in shared memory
/// and a team of 8 warps, which decompress it into the tile, a slice in four warps, a quarter of its chunks
/// each. Where a quarter begins follows from the distances of those before it, which their warps add up.
/// Another warpgroup multiplies the tiles by WGMMA with x, of which it has the next columns copied in the
/// meantime; the team fills its tile with zeros again. While the one is multiplied, the other one's team
/// decompresses.
///
/// A tile is A of WGMMA, with rows m next to each other (no swizzle): core matrices of 8 columns x 8 rows,
/// 16 bytes of rows per column. Row m = 2 lane + slice. Which column is which k is free as long as x agrees:
/// the 8 columns of a core matrix are `apart` columns from each other, a power of two. So the lanes of a
/// warp, which are within few columns of each other, are at the same place in their core matrices; and as
/// core matrices of neighbouring rows begin 16 bytes later, each lane writes a bank of its own.
///
/// Lanes are not equally far after a chunk, so that the chunks around the limit of a pass are read in both
/// passes; each takes the elements of its columns.
///
/// Sums are f32 in a fixed order: k within a block's units, then blocks.

namespace tessera::ops::sparse {

namespace tiles {

/// Descriptor of a tile without swizzle ("Matrix descriptor format"): bytes from a core matrix to the next
/// one along m or n (`outer`) and along k (`along_k`).
__device__ __forceinline__ uint64_t plain_descriptor(uint32_t address, uint32_t outer, uint32_t along_k) {
  return uint64_t((address & 0x3FFFF) >> 4) | uint64_t(along_k >> 4) << 16 | uint64_t(outer >> 4) << 32;
}

/// What the warpgroup that multiplies does, for `count` passes of a block.
template <class T, int kTokens>
__device__ __forceinline__ void multiply_passes(const Args<T>& args, Memory<kTokens>& memory, Pass now,
                                                int count, int block, int token_tile) {
  const SellWgmmaPlan& plan = args.plan;
  const int thread = int(threadIdx.x) % kMultiplyThreads, lane = thread % kWarp, warp = thread / kWarp;
  const uint32_t outer = outer_bytes(plan);
  const int stages = plan.apart / kStageColumns;
  // Asks for the stages of x that there is room for: as many as kStages after those that have been used.
  Pass loading = now;
  int loading_stage = 0, loaded = 0;
  gpu::RingState<kStages<kTokens>> to;
  const auto load_stages = [&](int used) {
    if (thread != 0) return;
    for (; loaded < min(count * stages, used + kStages<kTokens>); ++loaded) {
      const int weight = weight_of_tile(args.weights, args.count, loading.tile / kTilesOfWindow);
      memory.arrived[to.stage].arrive_expect(kStageBytes<kTokens>);
      gpu::bulk_load(memory.x[to.stage],
                     args.packed_at(weight, token_tile, loading.part, loading.pass) +
                         loading_stage * kStageBytes<kTokens>,
                     kStageBytes<kTokens>, memory.arrived[to.stage]);
      to.advance();
      if (++loading_stage == stages) loading_stage = 0, loading.advance(plan);
    }
  };
  load_stages(0);
  const uint64_t b_first = plain_descriptor(gpu::shared_address(memory.x), 128, kTokens * 16);
  float sums[kTeams][kTokens / 2] = {};
  const auto multiply = [&](float(&to_sums)[kTokens / 2], int t, gpu::RingState<kStages<kTokens>>& from,
                            uint32_t parity) {
    memory.filled[t].wait(parity);
    uint64_t a = plain_descriptor(gpu::shared_address(memory.tiles[t]), outer, kColumn);
    for (int stage = 0; stage < stages; ++stage) {
      memory.arrived[from.stage].wait(from.parity);
      const uint64_t b = b_first + uint64_t(from.stage * (kStageBytes<kTokens> >> 4));
      gpu::warpgroup_arrive();
#pragma unroll
      for (int step = 0; step < kStageSteps; ++step)
        gpu::wgmma<T, gpu::TileOrder::mn_major, gpu::TileOrder::k_major>(
            to_sums, a + uint64_t(step * 2 * (kColumn >> 4)), b + uint64_t(step * 2 * kTokens));
      gpu::warpgroup_commit();
      a += uint64_t(kStageSteps * 2 * (kColumn >> 4));
      from.advance();
    }
  };
  gpu::RingState<kStages<kTokens>> state;
  for (int i = 0; i < count; ++i) {
    const uint32_t parity = uint32_t(i) & 1;
    gpu::RingState<kStages<kTokens>> again = state;
    multiply(sums[0], 0, state, parity);
    multiply(sums[1], 1, again, parity);
    if (stages == kMostApart / kStageColumns)
      gpu::warpgroup_wait<kMostApart / kStageColumns>();
    else
      gpu::warpgroup_wait<0>();
    if (lane == 0) memory.multiplied[0].arrive();
    gpu::warpgroup_wait<0>();
    if (lane == 0) memory.multiplied[1].arrive();
    load_stages((i + 1) * stages);
    const bool has_next = i + 1 < count;
    if (!has_next || now.ends_rows(plan)) {
      const int of = now.tile * plan.token_tiles + token_tile,
                split = block - plan.block_of(now.tile * plan.parts);
#pragma unroll
      for (int t = 0; t < kTeams; ++t) {
        gpu::warpgroup_fence_operand(sums[t]);
        float* const to =
            args.partial +
            ((int64_t(of) * plan.splits + split) * kRows + t * kPairRows + warp * 16 + lane / 4) * kTokens +
            lane % 4 * 2;
#pragma unroll
        for (int n = 0; n < kTokens / 8; ++n) {
          *reinterpret_cast<float2*>(to + n * 8) = {sums[t][4 * n], sums[t][4 * n + 1]};
          *reinterpret_cast<float2*>(to + 8 * kTokens + n * 8) = {sums[t][4 * n + 2], sums[t][4 * n + 3]};
        }
#pragma unroll
        for (float& sum : sums[t]) sum = 0;
      }
    }
    now.advance(plan);
  }
}

}  // namespace tiles

template <class T, int kTokens>
__global__ void __launch_bounds__(tiles::kThreads, 1)
    multiply_tiles(const __grid_constant__ tiles::Args<T> args) {
  using namespace tiles;
  static_assert(sizeof(Memory<kTokens>) <= size_t(kMostShared));
  extern __shared__ __align__(128) char dynamic[];
  Memory<kTokens>& memory = *reinterpret_cast<Memory<kTokens>*>(dynamic);
  const SellWgmmaPlan& plan = args.plan;
  const int token_tile = int(blockIdx.x) % plan.token_tiles, block = int(blockIdx.x) / plan.token_tiles,
            first = plan.first_unit(block), count = (plan.first_unit(block + 1) - first) * plan.passes,
            team = int(threadIdx.x) / kTeamThreads;
  const Pass begin{first / plan.parts, first % plan.parts, 0};
  gpu::launch_dependents();
  if (threadIdx.x == 0) {
    for (gpu::Barrier& barrier : memory.arrived) barrier.init(1);
    for (int t = 0; t < kTeams; ++t)
      memory.filled[t].init(kTeamWarps), memory.multiplied[t].init(kMultiplyThreads / kWarp);
    gpu::fence_barrier_init();
  }
  __syncthreads();
  if (team == kTeams) {
    gpu::warpgroup_reg_alloc<kMultiplyRegisters>();
    gpu::grid_dependency_wait();
    multiply_passes<T, kTokens>(args, memory, begin, count, block, token_tile);
  } else {
    gpu::warpgroup_reg_dealloc<kTeamRegisters>();
    if (!args.constant) gpu::grid_dependency_wait();
    Decompression<T, kTokens> decompression(args, memory, team);
    if (plan.passes == 1)
      decompression.whole_parts(begin, count);
    else
      decompression.passes(begin, count);
    if (args.constant) gpu::grid_dependency_wait();
  }
}

}  // namespace tessera::ops::sparse
