#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "gpu/barrier.cuh"
#include "gpu/launch.cuh"
#include "gpu/reread.cuh"
#include "gpu/shared.cuh"
#include "gpu/tma.cuh"
#include "gpu/wgmma.cuh"
#include "ops/gemm/gemm_sm90_bias_gradient.cuh"
#include "ops/gemm/gemm_sm90_pair_bias_gradient.cuh"

/// Main loop of 16-bit GEMMs on sm_90a; epilogues are classes of their own (gemm_sm90_tma_store.cuh,
/// gemm_sm90_register_store.cuh).
///
/// Persistent and warp-specialised: a block walks over tiles of d. One thread of its first warpgroup issues
/// TMA loads of 64 of k of both operands per pipeline stage; two or three others issue WGMMA. Either
/// each takes its share of a tile's rows (cooperative: the largest tiles, the least traffic), or they take
/// whole tiles alternately (ping-pong), so that the epilogue of one overlaps the MMAs of the other, which a
/// short k needs. The order barrier of ping-pong is passed when the other's MMAs have been issued, not
/// before: a phase of the pipeline is identified by its parity only, so a warpgroup that waited too early
/// would take the completion of the phase before the last for that of its own.
///
/// The blocks of a cluster of two take tiles that are neighbours along m and share b (or along n, and share
/// a): each loads every second stage of the shared operand, by multicast for both. That is 37 instead of 53
/// bytes per clock and SM from L2 for a tile of 128 x 192; L2 delivers about 47.
///
/// GEMMs of weight gradients can sum the rows of a over k meanwhile: gemm_sm90_bias_gradient.cuh.
///
/// Edges need no padding: tensor maps hold the true extents, and TMA fills in zeros, along k in both
/// operands, so row padding is never read (what lies past the other edges costs time: clip_edges). A sum of
/// several products continues along k from one pair of matrices to the next (the maps' third dimension); each
/// ends with such an edge. MN-major operands are loaded in boxes of 64 columns.

namespace tessera::ops {

/// A configuration: layouts of the operands, a warpgroup's tile (kRows x kN, kRows 64 or 128), pipeline
/// stages, ping-pong, cluster size, whether its tiles are neighbours along n and share a, and whether a may
/// be summed; warpgroups that multiply, 2 or 3. kGatedB: the first half of b's columns in the tile are gates,
/// the other half the ups of the same features, which lie a matrix apart (gated_map): a tile is kFeatures
/// wide in d.
template <class Element, gpu::TileOrder kOrderA, gpu::TileOrder kOrderB, int kRowsOfGroup, int kColumns,
          int kRing, bool kPingPong_, int kBlocks, bool kAlongN = false, bool kSums = false,
          bool kGatedB = false, int kMultiplying = 2>
struct GemmTile {
  using T = Element;
  static constexpr gpu::TileOrder kA = kOrderA, kB = kOrderB;
  static constexpr int kGroups = kMultiplying, kThreads = 128 * (kGroups + 1), kDepth = 64;
  static constexpr int kRows = kRowsOfGroup, kN = kColumns, kStages = kRing, kCluster = kBlocks;
  static constexpr bool kPingPong = kPingPong_;
  static constexpr bool kSharesA = kAlongN && kBlocks > 1;  // else a cluster shares b
  static constexpr int kClusterM = kSharesA ? 1 : kBlocks,
                       kClusterN = kBlocks / kClusterM;               // tiles of a cluster along m and n
  static constexpr int kM = kPingPong ? kRows : kGroups * kRows;      // rows of a block's tile
  static constexpr int kMBlocks = kRows / 64;                         // MMAs of 64 rows per warpgroup
  static constexpr bool kManyAccumulators = kMBlocks * kN / 2 > 160;  // accumulators of a thread
  static constexpr int kBytesA = kM * 128;
  static constexpr int kBytesB = (kB == gpu::TileOrder::k_major ? kN : (kN + 63) / 64 * 64) * 128;
  static constexpr int kStageBytes = kBytesA + kBytesB;
  static constexpr bool kSumsA = kSums, kGated = kGatedB;
  static constexpr int kFeatures = kGated ? kN / 2 : kN;  // columns of d
  static_assert(kRows % 64 == 0 && kN % 8 == 0 && kN <= 256 && (kCluster == 1 || kCluster == 2));
  static_assert(kGroups == 2 || (kGroups == 3 && !kPingPong && kMBlocks * kN / 2 <= 96));
  /// Registers per thread: of the producer warpgroup and of the others.
  static constexpr int kFewRegisters = kGroups == 3        ? 32
                                       : kManyAccumulators ? 24
                                                           : 40,
                       kManyRegisters = kGroups == 3        ? 160
                                        : kManyAccumulators ? 240
                                                            : 232;
  static constexpr int kSumsBarrier = 1 + kGroups;  // the first of kGroups named barriers
  // Whether boxes past the edge can be left out: some producers have no registers for it.
  static constexpr bool kSkipsBoxes = kCluster == 1 || !(kManyAccumulators || kGroups == 3);
};

/// Work tile of a block: the tile of d number `batch` that begins at row m and column n, summed over `blocks`
/// k-blocks of 64 from `first` on. With splits > 1: split `split` of the split tile (of a cluster) `number`.
struct WorkTile {
  int m, n, batch, split, first, blocks, splits, number;
};

/// Tile scheduler: the tiles of a GEMM in the order in which blocks take them, in groups of tile rows, so
/// that concurrent tiles share operands. All tiles, or those of the last, partial wave, may be split along k:
/// the first `whole` are not. The splits of a tile are neighbours, and the grid is a multiple of their number
/// and divides `whole`, so that they run at the same time, each in the same wave.
struct GemmPlan {
  int m = 0, n = 0, k = 0, batch = 1, splits = 1;
  int blocks = 0;              // of 64 along k, of all terms
  int term_blocks = 0;         // of a term
  int split_blocks = 0;        // of a split; the last may have fewer
  int rows = 0, columns = 0;   // tiles of a cluster
  int group = 1;               // rows of tiles in a group
  int whole = 0;               // of batch * rows * columns tiles
  int items = 0;               // whole + splits * (the other tiles)
  int step_a = 0, step_b = 0;  // 0: the same matrix for the whole batch and all terms
  int stage_bytes = 0;         // that TMA loads per stage, boxes past the edge included
  // TMA takes several times as long for rows past an edge as for rows within. Where the epilogue may get rows
  // and columns twice, and anything past the edge (clip_edges), tiles begin here at most, and no box is
  // loaded that lies past the edge as a whole.
  int last_m = std::numeric_limits<int>::max(), last_n = std::numeric_limits<int>::max();
  bool skips_boxes = false;
  float* sums = nullptr;          // [m]: the sums of the rows of a over k; null: not wanted
  float* partial_sums = nullptr;  // partial_sum_rows() rows of them
  int sums_pitch = 0;             // stride of their rows: m rounded up to whole tiles
  int* sums_arrived = nullptr;    // per 64 rows: partial sums that have arrived; the last one resets it
  // [n]: the sums of the columns of b over k, for the second problem of a pair.
  float* sums_b = nullptr;
  float* partial_sums_b = nullptr;
  int sums_b_pitch = 0;

  /// Number of tiles of a tile row that sum a: at most 4, so that there are few partial sums to add up.
  template <class Tile>
  __host__ __device__ __forceinline__ int summing_tiles() const {
    return columns * Tile::kClusterN < 4 ? columns * Tile::kClusterN : 4;
  }
  /// Partial sums per element of `sums`: one per such tile and split.
  template <class Tile>
  __host__ __device__ __forceinline__ int partial_sum_rows() const {
    return summing_tiles<Tile>() * splits;
  }
  /// The same for `sums_b`: tiles of a tile column.
  template <class Tile>
  __host__ __device__ __forceinline__ int summing_tiles_b() const {
    return rows * Tile::kClusterM < 4 ? rows * Tile::kClusterM : 4;
  }

  /// Decodes work item `item` for the block of rank `rank` in its cluster. Items below `whole` are whole
  /// tiles, the others splits; the splits of a tile are consecutive. Tiles are numbered in groups of `group`
  /// tile rows, column by column within a group.
  template <class Tile>
  __device__ __forceinline__ WorkTile work_tile(int item, int rank) const {
    const int number = max(item - whole, 0) / splits, split = max(item - whole, 0) - number * splits;
    const bool splitted = item >= whole;
    const int in_all = min(item, whole) + number, tiles = rows * columns;
    const int batch_index = in_all / tiles, tile = in_all - batch_index * tiles;
    const int of_group = group * columns, g = tile / of_group, rest = tile - g * of_group;
    const int high = min(group, rows - g * group), column = rest / high,
              row = g * group + rest - column * high;
    const int first = split * split_blocks;
    return {min((row * Tile::kClusterM + (Tile::kSharesA ? 0 : rank)) * Tile::kM, last_m),
            min((column * Tile::kClusterN + (Tile::kSharesA ? rank : 0)) * Tile::kFeatures, last_n),
            batch_index,
            split,
            first,
            splitted ? min(split_blocks, blocks - first) : blocks,
            splitted ? splits : 1,
            number};
  }
};

/// Tensor maps of the operands: three dimensions, the last the batch. Several problems of the same extents at
/// unrelated addresses may form a batch as well, each with its own maps.
template <int kProblems>
struct GemmMapsOf {
  gpu::TensorMap a[kProblems], b[kProblems];
};
using GemmMaps = GemmMapsOf<1>;

/// An epilogue is a class with
///   struct Params                                a kernel parameter, tensor maps and all
///   static constexpr int kSharedBytes            per warpgroup, a multiple of 1024
///   static constexpr int kBarriers               per warpgroup, each initialised to one arrival
///   Epilogue(const Params&, char* shared, gpu::Barrier*, int group)     by all threads of the warpgroup
///   void begin(const WorkTile&, int row)      before the MMAs: issues the loads of what finish() needs
///   void finish(const WorkTile&, int row, float (&sums)[kMBlocks][kN / 2])
///   void end()                                   after the last tile
/// `row` is the warpgroup's first row in the tile; sums are laid out as in gpu/wgmma.cuh, sums[i] for rows 64
/// i ... 64 i + 63. Rows and columns past the edge hold zeros, unless the plan skips boxes or has smaller
/// ones than the tile (operand_maps): then anything. Its barriers among the warpgroup's threads are
/// sync_named(1 + group, 128).

template <class Tile, class Epilogue>
struct GemmShared {
  static constexpr int kEpilogueAt = Tile::kStages * Tile::kStageBytes;
  static constexpr int kRingAt = kEpilogueAt + Tile::kGroups * Epilogue::kSharedBytes;
  static constexpr int kBytes = kRingAt + int(sizeof(gpu::Ring<Tile::kStages>)) +
                                Tile::kGroups * (1 + Epilogue::kBarriers) * int(sizeof(gpu::Barrier));
  static_assert(kBytes <= 227 * 1024);
};

template <int kStages>
__device__ __forceinline__ void advance(gpu::RingState<kStages>& state, int blocks) {
  const int stage = state.stage + blocks;
  state.parity ^= uint32_t(stage / kStages) & 1;
  state.stage = stage % kStages;
}

/// Boxes of an operand in a stage: one, or those of 64 of its rows (columns of b).
template <gpu::TileOrder kOrder>
__host__ __device__ constexpr int boxes_of(int count) {
  return kOrder == gpu::TileOrder::k_major ? 1 : (count + 63) / 64;
}
/// Of them those that the `left` rows up to the edge reach, if the others are skipped.
template <gpu::TileOrder kOrder>
__device__ __forceinline__ int boxes_within(int count, int left, bool skips) {
  const int all = boxes_of<kOrder>(count);
  return kOrder == gpu::TileOrder::k_major || !skips ? all : min(all, max(left + 63, 0) / 64);
}

/// Producer thread: issues the TMA loads of both operands.
template <class Tile, int kProblems>
__device__ __forceinline__ void load_operands(const GemmMapsOf<kProblems>& maps, const GemmPlan& plan,
                                              char* stages, gpu::Ring<Tile::kStages>& ring, int rank) {
  using enum gpu::TileOrder;
  gpu::RingState<Tile::kStages> state;
  for (int item = int(blockIdx.x) / Tile::kCluster; item < plan.items;
       item += int(gridDim.x) / Tile::kCluster) {
    const WorkTile work = plan.work_tile<Tile>(item, rank);
    const int problem = kProblems > 1 ? work.batch : 0;
    // Index of the matrix in the batch, or of the term: there is never both a batch and several terms.
    int matrix = work.first / plan.term_blocks, k = (work.first - matrix * plan.term_blocks) * Tile::kDepth;
    matrix += work.batch;
    const bool skips = Tile::kSkipsBoxes && plan.skips_boxes;
    const int boxes_a = boxes_within<Tile::kA>(Tile::kM, plan.m - work.m, skips),
              boxes_b = boxes_within<Tile::kB>(Tile::kN, plan.n - work.n, skips);
    for (int block = 0; block < work.blocks; ++block) {
      char* const a = stages + state.stage * Tile::kStageBytes;
      char* const b = a + Tile::kBytesA;
      gpu::Barrier& full = ring.full[state.stage];
      ring.empty[state.stage].wait(state.parity ^ 1);
      constexpr int kBoxes = boxes_of<Tile::kA>(Tile::kM) + boxes_of<Tile::kB>(Tile::kN);
      full.arrive_expect(uint32_t(plan.stage_bytes - (kBoxes - boxes_a - boxes_b) * 8192));
      const bool for_both = (block & 1) == rank;
      const auto issue_load = [&]<bool kShared>(char* to, const gpu::TensorMap& map, int c0, int c1, int c2) {
        if constexpr (kShared)
          gpu::tma_load_multicast(to, map, full, 3, c0, c1, c2);
        else
          gpu::tma_load(to, map, full, c0, c1, c2);
      };
      if (!Tile::kSharesA || for_both) {
#pragma unroll
        for (int box = 0; box < boxes_of<Tile::kA>(Tile::kM); ++box) {
          if (box >= boxes_a) break;
          issue_load.template operator()<Tile::kSharesA>(
              a + box * 8192, maps.a[problem], Tile::kA == k_major ? k : work.m + box * 64,
              Tile::kA == k_major ? work.m : k, matrix * plan.step_a);
        }
      }
      if (Tile::kClusterM == 1 || for_both) {
#pragma unroll
        for (int box = 0; box < boxes_of<Tile::kB>(Tile::kN); ++box) {
          if (box >= boxes_b) break;
          issue_load.template operator()<(Tile::kClusterM > 1)>(
              b + box * 8192, maps.b[problem], Tile::kB == k_major ? k : work.n + box * 64,
              Tile::kB == k_major ? work.n : k, matrix * plan.step_b);
        }
      }
      state.advance();
      k += Tile::kDepth;
      if (k >= plan.k) ++matrix, k = 0;
    }
  }
}

/// Main loop of a warpgroup. Per k-block: waits for the stage, issues 4 k-steps of MMAs for each 64 rows, and
/// releases the stage of the previous k-block, whose MMAs are complete when only the newest group is pending
/// (warpgroup_wait<1>). The first MMA overwrites the accumulators (block | step == 0). `operand_sums` reads
/// the current stage while its MMAs run. `issued` is called after the last MMA is issued: ping-pong then
/// passes the order barrier.
template <class Tile, class Sums, class Issued>
__device__ __forceinline__ void mma_mainloop(float (&sums)[Tile::kMBlocks][Tile::kN / 2], Sums& operand_sums,
                                             int blocks, int row, char* stages,
                                             gpu::Ring<Tile::kStages>& ring,
                                             gpu::RingState<Tile::kStages>& state, Issued&& issued) {
  using T = typename Tile::T;
  const auto release = [&](int stage) {
    if (threadIdx.x % 32 == 0) {
      if constexpr (Tile::kCluster == 1) {
        ring.empty[stage].arrive();
      } else {
        ring.empty[stage].arrive_remote_relaxed(0);
        ring.empty[stage].arrive_remote_relaxed(1);
      }
    }
  };
  const uint64_t a_tile =
      gpu::tile_descriptor<Tile::kA>(gpu::shared_address(stages) + uint32_t(row) * 128, 8192);
  const uint64_t b_tile = gpu::tile_descriptor<Tile::kB>(gpu::shared_address(stages) + Tile::kBytesA, 8192);
  int previous_stage = 0;
  for (int block = 0; block < blocks; ++block) {
    ring.full[state.stage].wait(state.parity);
    const uint64_t at = uint64_t(state.stage * (Tile::kStageBytes >> 4));
#pragma unroll
    for (int m_block = 0; m_block < Tile::kMBlocks; ++m_block) gpu::warpgroup_fence_operand(sums[m_block]);
    gpu::warpgroup_arrive();
#pragma unroll
    for (int step = 0; step < 4; ++step)
#pragma unroll
      for (int m_block = 0; m_block < Tile::kMBlocks; ++m_block)
        gpu::wgmma<T, Tile::kA, Tile::kB>(
            sums[m_block],
            a_tile + at + uint64_t(m_block * (8192 >> 4)) + step * gpu::kDescriptorStep<Tile::kA>,
            b_tile + at + step * gpu::kDescriptorStep<Tile::kB>, block | step);
    gpu::warpgroup_commit();
    gpu::warpgroup_wait<1>();
    if (block > 0) release(previous_stage);
    previous_stage = state.stage;
    if constexpr (Tile::kSumsA) {
      operand_sums.visit(stages + previous_stage * Tile::kStageBytes, row);
    }
    state.advance();
  }
  issued();
  gpu::warpgroup_wait<0>();
#pragma unroll
  for (int m_block = 0; m_block < Tile::kMBlocks; ++m_block) gpu::warpgroup_fence_operand(sums[m_block]);
  release(previous_stage);
}

template <class Tile, class Epilogue, int kProblems>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    gemm_kernel(const __grid_constant__ GemmMapsOf<kProblems> maps, const __grid_constant__ GemmPlan plan,
                const __grid_constant__ typename Epilogue::Params params) {
  // Setup: barriers, PDL.
  using Shared = GemmShared<Tile, Epilogue>;
  extern __shared__ __align__(1024) char shared[];
  auto& ring = *reinterpret_cast<gpu::Ring<Tile::kStages>*>(shared + Shared::kRingAt);
  auto* const order_barriers = reinterpret_cast<gpu::Barrier*>(&ring + 1);  // ping-pong order barriers
  auto* const barriers = order_barriers + Tile::kGroups;
  const int group = gpu::uniform(int(threadIdx.x) / 128) - 1;
  const int rank = Tile::kCluster > 1 ? int(gpu::cluster_rank()) : 0;
  if (threadIdx.x == 0) {
    ring.init(1, 4 * (Tile::kPingPong ? 1 : Tile::kGroups) * Tile::kCluster);
    for (int i = 0; i < Tile::kGroups * (1 + Epilogue::kBarriers); ++i) order_barriers[i].init(1);
    gpu::fence_barrier_init();
#pragma unroll
    for (int problem = 0; problem < kProblems; ++problem) {
      gpu::prefetch_map(maps.a[problem]);
      gpu::prefetch_map(maps.b[problem]);
    }
  }
  if constexpr (Tile::kCluster > 1)
    gpu::cluster_sync();
  else
    __syncthreads();
  gpu::grid_dependency_wait();
  gpu::launch_dependents();  // PDL: lets the next kernel start on idle SMs

  if (group < 0) {
    // Producer warpgroup: warp 0 issues the TMA loads; the others reduce partial sums of a bias gradient.
    gpu::warpgroup_reg_dealloc<Tile::kFewRegisters>();
    if (threadIdx.x < 32 && gpu::elect_one()) load_operands<Tile>(maps, plan, shared, ring, rank);
    if constexpr (Tile::kSumsA) {
      const int warp = gpu::uniform(int(threadIdx.x) / 32);
      if constexpr (kProblems > 1) {
        if (warp > 0 && warp <= Tile::kGroups) reduce_pair_sums<Tile>(plan, warp - 1);
      } else {
        if (plan.sums && warp > 0 && warp <= Tile::kGroups) reduce_sums<Tile>(plan, warp - 1);
      }
    }
    __syncwarp();
  } else {
    // Consumer warpgroups.
    gpu::warpgroup_reg_alloc<Tile::kManyRegisters>();
    const int row = Tile::kPingPong ? 0 : group * Tile::kRows;
    Epilogue epilogue(params, shared + Shared::kEpilogueAt + group * Epilogue::kSharedBytes,
                      barriers + group * Epilogue::kBarriers, group);
    gpu::RingState<Tile::kStages> state;
    int number = 0;  // work tiles that this block has begun
    for (int item = int(blockIdx.x) / Tile::kCluster; item < plan.items;
         item += int(gridDim.x) / Tile::kCluster, ++number) {
      const WorkTile work = plan.work_tile<Tile>(item, Tile::kCluster > 1 ? gpu::reread_cluster_rank() : 0);
      if (Tile::kPingPong && number % 2 != group) {
        advance(state, work.blocks);
        continue;
      }
      epilogue.begin(work, row);
      // Warpgroup 1 waits for phase n of its barrier before its n-th tile (counted from 0), warpgroup 0 for
      // phase n - 1, so its first wait returns at once (parity 1 of a fresh barrier).
      if constexpr (Tile::kPingPong) order_barriers[group].wait(uint32_t(number / 2 + 1 - group) & 1);
      float sums[Tile::kMBlocks][Tile::kN / 2];
      const auto issued = [&] {
        if (Tile::kPingPong && threadIdx.x % 128 == 0) order_barriers[group ^ 1].arrive();
      };
      if constexpr (Tile::kSumsA && kProblems > 1) {
        const SummedRows summed = summed_rows<Tile>(plan, work, group);
        PairSums<Tile> with_sums{
            summed.tiles,
            summed.to ? k_blocks_until_summed(summed.index, summed.tiles, work.first) : work.blocks,
            summed.of_b};
        mma_mainloop<Tile>(sums, with_sums, work.blocks, row, shared, ring, state, issued);
        if (summed.to) {
          write_pair_sums(plan, work, summed, with_sums);
          gpu::sync_named(Tile::kSumsBarrier + group, 160);
        }
      } else {
        const bool sums_a = Tile::kSumsA && plan.sums && work.n / Tile::kN < plan.summing_tiles<Tile>();
        SumsOfA<Tile> of_a{
            plan.summing_tiles<Tile>(),
            sums_a ? k_blocks_until_summed(work.n / Tile::kN, plan.summing_tiles<Tile>(), work.first)
                   : work.blocks};
        mma_mainloop<Tile>(sums, of_a, work.blocks, row, shared, ring, state, issued);
        if constexpr (Tile::kSumsA) {
          if (sums_a) {
            write_sums<Tile>(plan, work, work.m + row, of_a);
            gpu::sync_named(Tile::kSumsBarrier + group, 160);
          }
        }
      }
      epilogue.finish(work, row, sums);
    }
    epilogue.end();
  }
  if constexpr (Tile::kCluster > 1)
    gpu::cluster_sync();  // a remote arrive must not reach a block that has exited
}

/// An operand, rows x columns as stored: K-major has m (n) rows of k elements, MN-major k rows of m (n).
template <class T>
struct GemmOperand {
  const T* data;
  int64_t ld, stride;  // stride of the batch; 0: the same matrix for all
};

template <class T, gpu::TileOrder kOrder>
gpu::TensorMap operand_map(const GemmOperand<T>& x, int64_t extent, int64_t k, int64_t batch, int boxed) {
  constexpr bool kKMajor = kOrder == gpu::TileOrder::k_major;
  return gpu::tensor_map<T, 3>(x.data, {kKMajor ? k : extent, kKMajor ? extent : k, x.stride ? batch : 1},
                               {x.ld, x.stride}, {64, kKMajor ? boxed : 64, 1}, gpu::Swizzle::k128);
}

/// A K-major b of 2 n rows for tiles with gates: its first n rows are the gates, the others the ups.
template <class T, class Tile>
gpu::TensorMap gated_map(const GemmOperand<T>& b, int64_t n, int64_t k) {
  static_assert(Tile::kGated && Tile::kB == gpu::TileOrder::k_major);
  return gpu::tensor_map<T, 3>(b.data, {k, n, 2}, {b.ld, n * b.ld}, {64, Tile::kFeatures, 2},
                               gpu::Swizzle::k128);
}

/// The plan of m x n x k on this tile, with `splits` splits of k (fewer if k is short) after `whole` tiles
/// that are not split; for the sum of `terms` such products.
template <class Tile>
GemmPlan gemm_plan(int64_t m, int64_t n, int64_t k, int64_t batch, int splits, int whole = 0,
                   int64_t terms = 1) {
  GemmPlan plan{.m = int(m), .n = int(n), .k = int(k), .batch = int(batch)};
  plan.term_blocks = int(gpu::ceil_div(k, Tile::kDepth));
  plan.blocks = int(terms) * plan.term_blocks;
  plan.split_blocks = int(gpu::ceil_div(plan.blocks, splits));
  plan.splits = int(gpu::ceil_div(plan.blocks, plan.split_blocks));
  plan.rows = int(gpu::ceil_div(m, Tile::kM * Tile::kClusterM));
  plan.columns = int(gpu::ceil_div(n, Tile::kFeatures * Tile::kClusterN));
  // Concurrent tiles should cover an area that is about square: 12 ... 16 tiles of 128 rows.
  plan.group = std::max(1, (Tile::kN > 192 ? 2048 : 1536) / (Tile::kM * Tile::kClusterM));
  const int tiles = plan.batch * plan.rows * plan.columns;
  plan.whole = plan.splits > 1 ? whole : tiles;
  plan.items = plan.whole + plan.splits * (tiles - plan.whole);
  plan.stage_bytes = Tile::kStageBytes;
  return plan;
}

/// Rows of a K-major operand's box: no more than there are, in whole swizzle atoms.
inline int box_rows(int tile, int64_t extent) {
  return int(std::min<int64_t>(tile, gpu::ceil_div(extent, 8) * 8));
}

/// Where the last tile of `extent` columns of d begins so that as few as possible lie past the edge: TMA
/// stores from columns that are multiples of 8 only (from others: an illegal instruction).
inline int last_column(int64_t extent, int tile) {
  return int(gpu::ceil_div(extent - tile, 8) * 8);
}

/// For epilogues that may get rows and columns of d twice, with the same sums, and take no notice of what is
/// past the edge: spares TMA what lies there. (Tiles across lines would cost more than an edge does, so those
/// of MN-major operands do not move.) Overlapping tiles must have the same splits.
template <class Tile>
void clip_edges(GemmPlan& plan) {
  check(!plan.sums && !plan.sums_b, "gemm: rows would be summed twice");
  const bool alike = plan.splits == 1 || plan.whole == 0;
  if (Tile::kA == gpu::TileOrder::k_major && alike && plan.m >= Tile::kM) plan.last_m = plan.m - Tile::kM;
  if (Tile::kB == gpu::TileOrder::k_major && alike && plan.n >= Tile::kFeatures)
    plan.last_n = last_column(plan.n, Tile::kFeatures);
  plan.skips_boxes = true;
}

/// Whether the blocks of clusters of two share B: where tiles of one block fill the GPU some times over.
inline bool pays_clusters(int64_t tiles, Device device) {
  const int multiprocessors = device.multiprocessors();
  return multiprocessors >= 2 && tiles > 8 * int64_t(multiprocessors);
}

template <class Tile, class Epilogue, int kProblems>
void launch_gemm(Device device, const GemmMapsOf<kProblems>& maps, const GemmPlan& plan,
                 const typename Epilogue::Params& params) {
  const int slots = device.multiprocessors() / Tile::kCluster;
  const int clusters = std::min(plan.items, slots - slots % plan.splits);
  check(clusters > 0 || plan.items == 0, "a GEMM in clusters of ", Tile::kCluster, " blocks on ",
        device.multiprocessors(), " SMs; give the stream more, or choose another variant");
  gpu::launch(device,
              {.grid = dim3(unsigned(clusters * Tile::kCluster)),
               .block = dim3(Tile::kThreads),
               .shared_bytes = size_t(GemmShared<Tile, Epilogue>::kBytes),
               .cluster = Tile::kCluster,
               .overlaps = true},
              gemm_kernel<Tile, Epilogue, kProblems>, maps, plan, params);
}

}  // namespace tessera::ops
