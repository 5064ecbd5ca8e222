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
/// The roles are those of gemm_sm90.cuh: one thread brings 64 of k per stage by TMA, two warpgroups multiply,
/// each half of the rows; blocks of a cluster of two are neighbours along m and share b, each bringing every
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
  static constexpr bool kPingPong = false, kSharesA = false;
  static constexpr int kDown = kBlocks, kSide = 1, kM = kGroups * kRows, kParts = kRows / 64;
  static constexpr int kValueBytes = int(sparse24::kTileValues) * 2,
                       kWordBytes = int(sparse24::kTileWords) * 4;
  static constexpr int kTilesOfA = kM / 64;
  static constexpr int kBytesB = kN * 128;
  static constexpr int kBytesA = kTilesOfA * (kValueBytes + kWordBytes);
  /// b first, so that it lies on multiples of 1024; then values, then metadata.
  static constexpr int kStageBytes = kBytesB + (kBytesA + 1023) / 1024 * 1024;
  static_assert(kN % 64 == 0 && kParts * kN <= 256);
};

struct Sparse24Operands {
  gpu::TensorMap b;
  const uint4* values;
  const uint32_t* metadata;
  int m_tiles, k_tiles;
};

/// The producer thread.
template <class Tile>
__device__ __forceinline__ void bring_sparse24(const Sparse24Operands& x, const GemmPlan& plan, char* stages,
                                               gpu::Ring<Tile::kStages>& ring, int rank) {
  using enum gpu::TileOrder;
  gpu::RingPlace<Tile::kStages> place;
  for (int item = int(blockIdx.x) / Tile::kCluster; item < plan.items;
       item += int(gridDim.x) / Tile::kCluster) {
    const WorkTile part = plan.part<Tile>(item, rank);
    const auto tile_of = [&](int row, int block) {
      return int64_t(min(part.m / 64 + row, x.m_tiles - 1)) * x.k_tiles + block;
    };
    for (int block = 0; block < part.blocks; ++block) {
      char* const b = stages + place.stage * Tile::kStageBytes;
      gpu::Barrier& full = ring.full[place.stage];
      ring.empty[place.stage].wait(place.parity ^ 1);
      full.arrive_expect(Tile::kBytesB + Tile::kBytesA);
      const int k = block * Tile::kDepth;
      if (Tile::kCluster == 1 || (block & 1) == rank) {
#pragma unroll
        for (int box = 0; box < (Tile::kB == k_major ? 1 : Tile::kN / 64); ++box) {
          const int c0 = Tile::kB == k_major ? k : part.n + box * 64, c1 = Tile::kB == k_major ? part.n : k;
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
        gpu::load_bytes(a + row * Tile::kValueBytes, x.values + tile * (Tile::kValueBytes / 16),
                        Tile::kValueBytes, full);
        gpu::load_bytes(a + Tile::kTilesOfA * Tile::kValueBytes + row * Tile::kWordBytes,
                        x.metadata + tile * sparse24::kTileWords, Tile::kWordBytes, full);
      }
      place.advance();
    }
  }
}

/// A of one block of k, as a thread of a warpgroup holds it.
template <class Tile>
struct Fragments24 {
  uint32_t a[Tile::kParts][2][4];  // part, step
  uint32_t metadata[Tile::kParts];

  /// `row`: the first tile of A of this warpgroup in the stage.
  __device__ __forceinline__ void from_stage(const char* stage, int row) {
    const uint32_t at = gpu::shared_address(stage) + Tile::kBytesB, thread = threadIdx.x % 128;
#pragma unroll
    for (int part = 0; part < Tile::kParts; ++part) {
#pragma unroll
      for (int step = 0; step < 2; ++step)
        gpu::load_fragment(a[part][step],
                           at + uint32_t((row + part) * Tile::kValueBytes + step * 2048) + thread * 16);
      gpu::load_fragment(
          metadata[part],
          at + uint32_t(Tile::kTilesOfA * Tile::kValueBytes + (row + part) * Tile::kWordBytes) + thread * 4);
    }
  }
};

/// One warpgroup's MMAs of one tile.
template <class Tile>
class Multiplier24 {
  using T = typename Tile::T;

 public:
  __device__ __forceinline__ Multiplier24(char* stages, gpu::Ring<Tile::kStages>& ring, int group)
      : stages_(stages), ring_(ring), row_(group * Tile::kParts) {}

  __device__ __forceinline__ void run(float (&sums)[Tile::kParts][Tile::kN / 2], const WorkTile& part,
                                      gpu::RingPlace<Tile::kStages>& place) {
    blocks_ = part.blocks;
    Fragments24<Tile> even, odd;
    take(even, place);
    int block = 0;
    for (; block + 2 <= blocks_; block += 2) {
      one(sums, even, odd, block, place);
      one(sums, odd, even, block + 1, place);
    }
    if (block < blocks_) one(sums, even, odd, block, place);
    gpu::warpgroup_wait<0>();
#pragma unroll
    for (int i = 0; i < Tile::kParts; ++i) gpu::pin(sums[i]);
    release(before_);
  }

 private:
  __device__ __forceinline__ void take(Fragments24<Tile>& set, const gpu::RingPlace<Tile::kStages>& place) {
    ring_.full[place.stage].wait(place.parity);
    set.from_stage(stages_ + place.stage * Tile::kStageBytes, row_);
  }

  /// Block `block` with the fragments `now`; then takes those of the next block.
  __device__ __forceinline__ void one(float (&sums)[Tile::kParts][Tile::kN / 2], const Fragments24<Tile>& now,
                                      Fragments24<Tile>& next, int block,
                                      gpu::RingPlace<Tile::kStages>& place) {
    const uint64_t b = gpu::tile_descriptor<Tile::kB>(gpu::shared_address(stages_), 8192) +
                       uint64_t(place.stage * (Tile::kStageBytes >> 4));
#pragma unroll
    for (int part = 0; part < Tile::kParts; ++part) gpu::pin(sums[part]);
    gpu::warpgroup_arrive();
#pragma unroll
    for (int part = 0; part < Tile::kParts; ++part)
      gpu::multiply_sparse<T, 0, Tile::kB>(sums[part], now.a[part][0], b, now.metadata[part], block);
#pragma unroll
    for (int part = 0; part < Tile::kParts; ++part)
      gpu::multiply_sparse<T, 1, Tile::kB>(sums[part], now.a[part][1],
                                           b + gpu::kSparseDescriptorStep<Tile::kB>, now.metadata[part]);
    gpu::warpgroup_commit();
    gpu::warpgroup_wait<1>();
    if (block > 0) release(before_);
    before_ = place.stage;
    place.advance();
    if (block + 1 < blocks_) take(next, place);
  }

  __device__ __forceinline__ void release(int stage) {
    if (threadIdx.x % 32 != 0) return;
    if constexpr (Tile::kCluster == 1) {
      ring_.empty[stage].arrive();
    } else {
      ring_.empty[stage].let_go_at(0);
      ring_.empty[stage].let_go_at(1);
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
    if (threadIdx.x < 32 && gpu::elect_one()) bring_sparse24<Tile>(x, plan, shared, ring, rank);
    __syncwarp();
  } else {
    gpu::warpgroup_reg_alloc<240>();
    const int row = group * Tile::kRows;
    Epilogue epilogue(params, shared + Shared::kEpilogueAt + group * Epilogue::kSharedBytes,
                      barriers + group * Epilogue::kBarriers, group);
    gpu::RingPlace<Tile::kStages> place;
    for (int item = int(blockIdx.x) / Tile::kCluster; item < plan.items;
         item += int(gridDim.x) / Tile::kCluster) {
      const WorkTile part = plan.part<Tile>(item, Tile::kCluster > 1 ? gpu::reread_cluster_rank() : 0);
      epilogue.begin(part, row);
      float sums[Tile::kParts][Tile::kN / 2];
      Multiplier24<Tile>(shared, ring, group).run(sums, part, place);
      epilogue.finish(part, row, sums);
    }
    epilogue.end();
  }
  if constexpr (Tile::kCluster > 1)
    gpu::cluster_sync();  // no remote arrive may reach a block that has exited
}

}  // namespace tessera::ops
