#pragma once

#include "gpu/global.cuh"
#include "gpu/wgmma_sparse.cuh"
#include "ops/gemm/gemm_sm90.cuh"
#include "ops/sparse24/sparse24_layout.h"

/// The main loop of d = A b with a 2:4 A of 16 bits, on sm_90a.
///
/// A 64 x N x 32 MMA takes N / 2 clocks, as a dense one of half that k, and reads 32 rows of b, N / 2 clocks
/// of shared memory at 128 bytes each: shared memory is what bounds it. Per 64 of k a tile of 128 x 256 (or
/// 256 x 128) has 512 clocks of MMA; of shared memory, 512 to read b for each 64 rows, 256 (128) to write it
/// and, where A comes that way, 128 (256) for A: 896, 57 % of the peak, 1.13 PFLOP/s counted dense. With A
/// from L2 straight into registers it is 768 (640): 67 % (80 %).
///
/// The roles are those of gemm_sm90.cuh: one thread brings 64 of k per stage by TMA, two warpgroups multiply,
/// each half of the rows; blocks of a cluster of two are neighbours along m and share b, each bringing every
/// second stage for both. A lies in global memory in the order of the fragments (sparse24_layout.h), in tiles
/// of 64 x 64: 4 KB of values, 512 bytes of metadata. It comes to registers either through the ring (plain
/// bulk copies, then 16 bytes per thread and step), or from global memory at once, kAhead blocks of k ahead,
/// the L2 having been asked for it some stages before.
///
/// A fragment's registers may be written again when the MMA that reads it is done. So there are two sets (or
/// kAhead + 1), and that of the block before the last is filled once it is known to be done, under the MMAs
/// of the current block.
///
/// Edges: A is padded with zeros, TMA fills in zeros for b past its edge and clips d. A row of tiles past the
/// last one is read as the last.

namespace tessera::ops {

/// kRowsOfGroup (64, 128) x kColumns per warpgroup, stages of the ring, blocks of the cluster; kFromL2: A
/// does not pass through shared memory.
template <class Element, gpu::TileOrder kOrderB, int kRowsOfGroup, int kColumns, int kRing, int kBlocks,
          bool kFromL2>
struct Sparse24Tile {
  using T = Element;
  static constexpr gpu::TileOrder kB = kOrderB;
  static constexpr int kGroups = 2, kThreads = 128 * (kGroups + 1), kDepth = 64;
  static constexpr int kRows = kRowsOfGroup, kN = kColumns, kStages = kRing, kCluster = kBlocks;
  static constexpr bool kPingPong = false, kSharesA = false, kDirect = kFromL2;
  static constexpr int kDown = kBlocks, kSide = 1, kM = kGroups * kRows, kParts = kRows / 64;
  static constexpr int kValueBytes = int(sparse24::kTileValues) * 2,
                       kWordBytes = int(sparse24::kTileWords) * 4;
  static constexpr int kTilesOfA = kM / 64;
  static constexpr int kBytesB = kN * 128;
  static constexpr int kBytesA = kDirect ? 0 : kTilesOfA * (kValueBytes + kWordBytes);
  /// b first, so that it lies on multiples of 1024; then values, then metadata.
  static constexpr int kStageBytes = kBytesB + (kBytesA + 1023) / 1024 * 1024;
  static constexpr int kAhead = kDirect ? 2 : 1, kSets = kAhead + 1;
  static_assert(kN % 64 == 0 && kParts * kN <= 256);
};

struct Sparse24Operands {
  gpu::TensorMap b;
  const uint4* values;
  const uint32_t* metadata;
  int m_tiles, k_tiles;
};

/// Blocks of k by which A is asked for in L2 before it is loaded.
inline constexpr int kSparse24Prefetch = 6;

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
        if constexpr (Tile::kDirect) {
          if (block % 2 == 0 && block + kSparse24Prefetch < part.blocks) {
            // Two tiles of k lie one after the other.
            const int64_t tile = tile_of(row, block + kSparse24Prefetch);
            const int count = min(2, part.blocks - block - kSparse24Prefetch);
            gpu::prefetch_bytes(x.values + tile * (Tile::kValueBytes / 16),
                                uint32_t(count * Tile::kValueBytes));
            gpu::prefetch_bytes(x.metadata + tile * sparse24::kTileWords, uint32_t(count * Tile::kWordBytes));
          }
        } else {
          char* const a = b + Tile::kBytesB;
          const int64_t tile = tile_of(row, block);
          gpu::load_bytes(a + row * Tile::kValueBytes, x.values + tile * (Tile::kValueBytes / 16),
                          Tile::kValueBytes, full);
          gpu::load_bytes(a + Tile::kTilesOfA * Tile::kValueBytes + row * Tile::kWordBytes,
                          x.metadata + tile * sparse24::kTileWords, Tile::kWordBytes, full);
        }
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
  /// `values`, `words`: this thread's first of the warpgroup's first tile; `down`: tiles to the next 64 rows.
  __device__ __forceinline__ void from_memory(const uint4* values, const uint32_t* words, int64_t down,
                                              int block) {
#pragma unroll
    for (int part = 0; part < Tile::kParts; ++part) {
      const int64_t tile = part * down + block;
#pragma unroll
      for (int step = 0; step < 2; ++step)
        gpu::load_fragment(a[part][step], values + tile * (Tile::kValueBytes / 16) + step * 128);
      gpu::load_fragment(metadata[part], words + tile * sparse24::kTileWords);
    }
  }
};

/// One warpgroup's MMAs of one tile.
template <class Tile>
class Multiplier24 {
  using T = typename Tile::T;

 public:
  __device__ __forceinline__ Multiplier24(const Sparse24Operands& x, char* stages,
                                          gpu::Ring<Tile::kStages>& ring, int group)
      : x_(x), stages_(stages), ring_(ring), row_(group * Tile::kParts) {}

  __device__ __forceinline__ void run(float (&sums)[Tile::kParts][Tile::kN / 2], const WorkTile& part,
                                      gpu::RingPlace<Tile::kStages>& place) {
    blocks_ = part.blocks;
    if constexpr (Tile::kDirect) {
      // Of a tile past the last row of tiles, and of the last one's second part, the last is read.
      const int thread = int(threadIdx.x) % 128, first = min(part.m / 64 + row_, x_.m_tiles - 1);
      const int64_t tile = int64_t(first) * x_.k_tiles;
      values_ = x_.values + tile * (Tile::kValueBytes / 16) + thread;
      words_ = x_.metadata + tile * sparse24::kTileWords + thread;
      down_ = first + Tile::kParts <= x_.m_tiles ? x_.k_tiles : 0;
    }
    Fragments24<Tile> sets[Tile::kSets];
    if constexpr (Tile::kDirect) {
#pragma unroll
      for (int ahead = 0; ahead < Tile::kAhead; ++ahead)
        sets[ahead].from_memory(values_, words_, down_, min(ahead, blocks_ - 1));
    } else {
      ring_.full[place.stage].wait(place.parity);
      sets[0].from_stage(stages_ + place.stage * Tile::kStageBytes, row_);
    }
    int block = 0;
    for (; block + Tile::kSets <= blocks_; block += Tile::kSets)
      several<0, Tile::kSets>(sums, sets, block, place);
    rest<0>(sums, sets, block, place);
    gpu::warpgroup_wait<0>();
#pragma unroll
    for (int i = 0; i < Tile::kParts; ++i) gpu::pin(sums[i]);
    release(before_);
  }

 private:
  template <int kSet, int kEnd>
  __device__ __forceinline__ void several(float (&sums)[Tile::kParts][Tile::kN / 2],
                                          Fragments24<Tile> (&sets)[Tile::kSets], int block,
                                          gpu::RingPlace<Tile::kStages>& place) {
    one<kSet>(sums, sets, block + kSet, place);
    if constexpr (kSet + 1 < kEnd) several<kSet + 1, kEnd>(sums, sets, block, place);
  }
  template <int kSet>
  __device__ __forceinline__ void rest(float (&sums)[Tile::kParts][Tile::kN / 2],
                                       Fragments24<Tile> (&sets)[Tile::kSets], int block,
                                       gpu::RingPlace<Tile::kStages>& place) {
    if (block + kSet >= blocks_) return;
    one<kSet>(sums, sets, block + kSet, place);
    if constexpr (kSet + 2 < Tile::kSets) rest<kSet + 1>(sums, sets, block, place);
  }

  /// Block `block` with the fragments of set kSet; then those of the next one.
  template <int kSet>
  __device__ __forceinline__ void one(float (&sums)[Tile::kParts][Tile::kN / 2],
                                      Fragments24<Tile> (&sets)[Tile::kSets], int block,
                                      gpu::RingPlace<Tile::kStages>& place) {
    if constexpr (Tile::kDirect) ring_.full[place.stage].wait(place.parity);
    const uint64_t b = gpu::tile_descriptor<Tile::kB>(gpu::shared_address(stages_), 8192) +
                       uint64_t(place.stage * (Tile::kStageBytes >> 4));
#pragma unroll
    for (int part = 0; part < Tile::kParts; ++part) gpu::pin(sums[part]);
    gpu::warpgroup_arrive();
#pragma unroll
    for (int part = 0; part < Tile::kParts; ++part)
      gpu::multiply_sparse<T, 0, Tile::kB>(sums[part], sets[kSet].a[part][0], b, sets[kSet].metadata[part],
                                           block);
#pragma unroll
    for (int part = 0; part < Tile::kParts; ++part)
      gpu::multiply_sparse<T, 1, Tile::kB>(sums[part], sets[kSet].a[part][1],
                                           b + gpu::kSparseDescriptorStep<Tile::kB>,
                                           sets[kSet].metadata[part]);
    gpu::warpgroup_commit();
    gpu::warpgroup_wait<1>();
    if (block > 0) release(before_);
    before_ = place.stage;
    place.advance();
    constexpr int kNext = (kSet + Tile::kAhead) % Tile::kSets;
    if constexpr (Tile::kDirect) {
      sets[kNext].from_memory(values_, words_, down_, min(block + Tile::kAhead, blocks_ - 1));
    } else if (block + 1 < blocks_) {
      ring_.full[place.stage].wait(place.parity);
      sets[kNext].from_stage(stages_ + place.stage * Tile::kStageBytes, row_);
    }
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

  const Sparse24Operands& x_;
  char* const stages_;
  gpu::Ring<Tile::kStages>& ring_;
  const int row_;
  int blocks_ = 0, before_ = 0;
  const uint4* values_ = nullptr;
  const uint32_t* words_ = nullptr;
  int64_t down_ = 0;
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
      Multiplier24<Tile>(x, shared, ring, group).run(sums, part, place);
      epilogue.finish(part, row, sums);
    }
    epilogue.end();
  }
  if constexpr (Tile::kCluster > 1)
    gpu::cluster_sync();  // no remote arrive may reach a block that has exited
}

}  // namespace tessera::ops
