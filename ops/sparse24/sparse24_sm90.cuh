#pragma once

#include "gpu/wgmma_sparse.cuh"
#include "ops/gemm/gemm_sm90.cuh"
#include "ops/sparse24/sparse24_layout.h"

/// The main loop of d = A b with a 2:4 A of 16 bits, on sm_90a.
///
/// A 64 x N x 32 MMA takes N / 2 clocks, as a dense one of half that k, and reads 32 rows of b, N / 2 clocks
/// of shared memory at 128 bytes each: shared memory is what bounds it. Per 64 of k a tile of 128 x 256 (or
/// 256 x 128) has 512 clocks of MMA; of shared memory, 512 to read b for each 64 rows, 256 (128) to write it
/// and 128 (256) for A: 896, 57 % of the peak, 1.13 PFLOP/s counted dense.
///
/// The roles are those of gemm_sm90.cuh: one thread loads 64 of k per stage by TMA, two warpgroups multiply,
/// each half of the rows; blocks of a cluster of two are neighbours along m and share b, each loading every
/// second stage for both. A lies in global memory in the order of the fragments (sparse24_layout.h), in tiles
/// of 64 x 64: 4 KB of values, 512 bytes of metadata, and comes to registers through the ring (plain bulk
/// copies, then 16 bytes per thread and step).
///
/// A fragment's registers may be written again when the MMA that reads it is done. So there are two sets:
/// that of the block before is filled once it is known to be done, under the MMAs of the current block.
///
/// Edges: A is padded with zeros, TMA fills in zeros for b past its edge and clips d. A row of tiles past the
/// last one is read as the last.

namespace tessera::ops {

/// kRowsOfGroup (64, 128) x kColumns per warpgroup, stages of the ring, blocks of the cluster.
template <class Element, gpu::TileOrder kOrderB, int kRowsOfGroup, int kColumns, int kRing, int kBlocks>
struct Sparse24Tile {
  using T = Element;
  static constexpr gpu::TileOrder kB = kOrderB;
  static constexpr int kGroups = 2, kThreads = 128 * (kGroups + 1), kDepth = 64;
  static constexpr int kRows = kRowsOfGroup, kN = kColumns, kStages = kRing, kCluster = kBlocks;
  static constexpr int kFeatures = kN;
  static constexpr bool kPingPong = false, kSharesA = false, kGated = false;
  static constexpr int kClusterM = kBlocks, kClusterN = 1, kM = kGroups * kRows, kMBlocks = kRows / 64;
  static constexpr int kValueBytes = int(sparse24::kTileValues) * 2,
                       kWordBytes = int(sparse24::kTileWords) * 4;
  static constexpr int kTilesOfA = kM / 64;
  static constexpr int kBytesB = kN * 128;
  static constexpr int kBytesA = kTilesOfA * (kValueBytes + kWordBytes);
  /// b first, so that it lies on multiples of 1024; then values, then metadata.
  static constexpr int kStageBytes = kBytesB + (kBytesA + 1023) / 1024 * 1024;
  static_assert(kN % 64 == 0 && kMBlocks * kN <= 256);
};

struct Sparse24Operands {
  gpu::TensorMap b;
  const uint4* values;
  const uint32_t* metadata;
  int m_tiles, k_tiles;
};

/// The producer thread.
template <class Tile>
__device__ __forceinline__ void load_sparse24_operands(const Sparse24Operands& x, const GemmPlan& plan,
                                                       char* stages, gpu::Ring<Tile::kStages>& ring,
                                                       int rank) {
  using enum gpu::TileOrder;
  gpu::RingState<Tile::kStages> state;
  for (int item = int(blockIdx.x) / Tile::kCluster; item < plan.items;
       item += int(gridDim.x) / Tile::kCluster) {
    const WorkTile work = plan.work_tile<Tile>(item, rank);
    const auto tile_of = [&](int row, int block) {
      return int64_t(min(work.m / 64 + row, x.m_tiles - 1)) * x.k_tiles + block;
    };
    for (int block = 0; block < work.blocks; ++block) {
      char* const b = stages + state.stage * Tile::kStageBytes;
      gpu::Barrier& full = ring.full[state.stage];
      ring.empty[state.stage].wait(state.parity ^ 1);
      full.arrive_expect(Tile::kBytesB + Tile::kBytesA);
      const int k = block * Tile::kDepth;
      if (Tile::kCluster == 1 || (block & 1) == rank) {
#pragma unroll
        for (int box = 0; box < (Tile::kB == k_major ? 1 : Tile::kN / 64); ++box) {
          const int c0 = Tile::kB == k_major ? k : work.n + box * 64, c1 = Tile::kB == k_major ? work.n : k;
          if constexpr (Tile::kCluster > 1)
            gpu::tma_load_multicast(b + box * 8192, x.b, full, 3, c0, c1, 0);
          else
            gpu::tma_load(b + box * 8192, x.b, full, c0, c1, 0);
        }
      }
#pragma unroll
      for (int row = 0; row < Tile::kTilesOfA; ++row) {
        char* const a = b + Tile::kBytesB;
        const int64_t tile = tile_of(row, block);
        gpu::bulk_load(a + row * Tile::kValueBytes, x.values + tile * (Tile::kValueBytes / 16),
                       Tile::kValueBytes, full);
        gpu::bulk_load(a + Tile::kTilesOfA * Tile::kValueBytes + row * Tile::kWordBytes,
                       x.metadata + tile * sparse24::kTileWords, Tile::kWordBytes, full);
      }
      state.advance();
    }
  }
}

/// A of one block of k, as a thread of a warpgroup holds it.
template <class Tile>
struct Fragments24 {
  uint32_t a[Tile::kMBlocks][2][4];  // part, step
  uint32_t metadata[Tile::kMBlocks];

  /// `row`: the first tile of A of this warpgroup in the stage.
  __device__ __forceinline__ void from_stage(const char* stage, int row) {
    const uint32_t at = gpu::shared_address(stage) + Tile::kBytesB, thread = threadIdx.x % 128;
#pragma unroll
    for (int m_block = 0; m_block < Tile::kMBlocks; ++m_block) {
#pragma unroll
      for (int step = 0; step < 2; ++step)
        gpu::load_fragment(a[m_block][step],
                           at + uint32_t((row + m_block) * Tile::kValueBytes + step * 2048) + thread * 16);
      gpu::load_fragment(
          metadata[m_block],
          at + uint32_t(Tile::kTilesOfA * Tile::kValueBytes + (row + m_block) * Tile::kWordBytes) +
              thread * 4);
    }
  }
};

/// One warpgroup's MMAs of one tile.
template <class Tile>
class MainLoop24 {
  using T = typename Tile::T;

 public:
  __device__ __forceinline__ MainLoop24(char* stages, gpu::Ring<Tile::kStages>& ring, int group)
      : stages_(stages), ring_(ring), row_(group * Tile::kMBlocks) {}

  __device__ __forceinline__ void run(float (&sums)[Tile::kMBlocks][Tile::kN / 2], const WorkTile& work,
                                      gpu::RingState<Tile::kStages>& state) {
    blocks_ = work.blocks;
    Fragments24<Tile> even, odd;
    load_fragments(even, state);
    int block = 0;
    for (; block + 2 <= blocks_; block += 2) {
      mma_k_block(sums, even, odd, block, state);
      mma_k_block(sums, odd, even, block + 1, state);
    }
    if (block < blocks_) mma_k_block(sums, even, odd, block, state);
    gpu::warpgroup_wait<0>();
#pragma unroll
    for (int i = 0; i < Tile::kMBlocks; ++i) gpu::warpgroup_fence_operand(sums[i]);
    release(before_);
  }

 private:
  __device__ __forceinline__ void load_fragments(Fragments24<Tile>& set,
                                                 const gpu::RingState<Tile::kStages>& state) {
    ring_.full[state.stage].wait(state.parity);
    set.from_stage(stages_ + state.stage * Tile::kStageBytes, row_);
  }

  /// Block `block` with the fragments `now`; then takes those of the next block.
  __device__ __forceinline__ void mma_k_block(float (&sums)[Tile::kMBlocks][Tile::kN / 2],
                                              const Fragments24<Tile>& now, Fragments24<Tile>& next,
                                              int block, gpu::RingState<Tile::kStages>& state) {
    const uint64_t b = gpu::tile_descriptor<Tile::kB>(gpu::shared_address(stages_), 8192) +
                       uint64_t(state.stage * (Tile::kStageBytes >> 4));
#pragma unroll
    for (int m_block = 0; m_block < Tile::kMBlocks; ++m_block) gpu::warpgroup_fence_operand(sums[m_block]);
    gpu::warpgroup_arrive();
#pragma unroll
    for (int m_block = 0; m_block < Tile::kMBlocks; ++m_block)
      gpu::wgmma_sparse<T, 0, Tile::kB>(sums[m_block], now.a[m_block][0], b, now.metadata[m_block], block);
#pragma unroll
    for (int m_block = 0; m_block < Tile::kMBlocks; ++m_block)
      gpu::wgmma_sparse<T, 1, Tile::kB>(sums[m_block], now.a[m_block][1],
                                        b + gpu::kSparseDescriptorStep<Tile::kB>, now.metadata[m_block]);
    gpu::warpgroup_commit();
    gpu::warpgroup_wait<1>();
    if (block > 0) release(before_);
    before_ = state.stage;
    state.advance();
    if (block + 1 < blocks_) load_fragments(next, state);
  }

  __device__ __forceinline__ void release(int stage) {
    if (threadIdx.x % 32 != 0) return;
    if constexpr (Tile::kCluster == 1) {
      ring_.empty[stage].arrive();
    } else {
      ring_.empty[stage].arrive_remote_relaxed(0);
      ring_.empty[stage].arrive_remote_relaxed(1);
    }
  }

  char* const stages_;
  gpu::Ring<Tile::kStages>& ring_;
  const int row_;
  int blocks_ = 0, before_ = 0;
};

template <class Tile, class Epilogue>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    sparse24_kernel(const __grid_constant__ Sparse24Operands x, const __grid_constant__ GemmPlan plan,
                    const __grid_constant__ typename Epilogue::Params params) {
  using Shared = GemmShared<Tile, Epilogue>;
  extern __shared__ __align__(1024) char shared[];
  auto& ring = *reinterpret_cast<gpu::Ring<Tile::kStages>*>(shared + Shared::kRingAt);
  auto* const barriers = reinterpret_cast<gpu::Barrier*>(&ring + 1);
  const int group = gpu::uniform(int(threadIdx.x) / 128) - 1;
  const int rank = Tile::kCluster > 1 ? int(gpu::cluster_rank()) : 0;
  if (threadIdx.x == 0) {
    ring.init(1, 8 * Tile::kCluster);
    for (int i = 0; i < Tile::kGroups * Epilogue::kBarriers; ++i) barriers[i].init(1);
    gpu::fence_barrier_init();
    gpu::prefetch_map(x.b);
  }
  if constexpr (Tile::kCluster > 1)
    gpu::cluster_sync();
  else
    __syncthreads();
  gpu::grid_dependency_wait();
  gpu::launch_dependents();  // PDL: lets the next kernel start on idle SMs

  if (group < 0) {
    gpu::warpgroup_reg_dealloc<24>();
    if (threadIdx.x < 32 && gpu::elect_one()) load_sparse24_operands<Tile>(x, plan, shared, ring, rank);
    __syncwarp();
  } else {
    gpu::warpgroup_reg_alloc<240>();
    const int row = group * Tile::kRows;
    Epilogue epilogue(params, shared + Shared::kEpilogueAt + group * Epilogue::kSharedBytes,
                      barriers + group * Epilogue::kBarriers, group);
    gpu::RingState<Tile::kStages> state;
    for (int item = int(blockIdx.x) / Tile::kCluster; item < plan.items;
         item += int(gridDim.x) / Tile::kCluster) {
      const WorkTile work = plan.work_tile<Tile>(item, Tile::kCluster > 1 ? gpu::reread_cluster_rank() : 0);
      epilogue.begin(work, row);
      float sums[Tile::kMBlocks][Tile::kN / 2];
      MainLoop24<Tile>(shared, ring, group).run(sums, work, state);
      epilogue.finish(work, row, sums);
    }
    epilogue.end();
  }
  if constexpr (Tile::kCluster > 1)
    gpu::cluster_sync();  // a remote arrive must not reach a block that has exited
}

}  // namespace tessera::ops
