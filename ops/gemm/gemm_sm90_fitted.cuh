#pragma once

#include "gpu/mma.cuh"
#include "gpu/tma.cuh"
#include "gpu/wgmma.cuh"
#include "ops/gemm/gemm_sm90_fitted_internal.h"
#include "ops/gemm/gemm_sm90_plan.h"
#include "ops/gemm/gemm_sm90_tma_store.cuh"
#include "ops/gemm/zero_rows.cuh"

/// Tiles fitted to the GEMM, on sm_90a: 64, 128 or 192 columns of d times a number of rows that is an
/// argument, so that the tiles of a d of any size fill whole waves of SMs.
///
/// Operands are swapped: op(B)'s columns are the M side of WGMMA, op(A)'s rows its N, which comes in steps of
/// 8. So a warpgroup holds 64 columns of d times all rows of the tile. stmatrix transposes them, and they
/// leave as one TMA box of 64 columns, a whole line, times the tile's rows; an addend comes in as one. (Boxes
/// of 16 or 32 rows from two buffers would leave room for another stage, but take longer:
/// docs/ops/gemm_attempts.md.)
///
/// Persistent and warp-specialised like gemm_sm90.cuh: the warps of one warpgroup issue TMA loads of 64 of k
/// per stage, two or three others multiply, each 64 columns. Tiles of 64 columns in all (kHalvesK) are shared
/// by two warpgroups, each of which takes every second stage, of which there is an even number; the first one
/// adds up both halves of the sum.
///
/// The number of rows selects a main loop at run time, one for each width of WGMMA; everything else is
/// shared.
///
/// kScatter (gemm_scatter_internal.h): a tile's rows leave the panel one by one, 16 bytes per thread, for the
/// rows of d that are theirs, and an addend comes in the same way. Warps that issue no loads write zeros to
/// d's other rows while the tiles are multiplied. The grid has a block for every SM, also those without a
/// tile.

namespace tessera::ops {
namespace {

template <class T>
struct FittedArgs {
  int rows;                           // of a tile
  int stages, stage_bytes;            // of the ring
  int bytes_a, bytes_b;               // of 64 of k: of the tile's rows, of a box of 64 columns
  int n, last_row, last_column;       // of d; where a tile begins at most (GemmPlan::last_m)
  int blocks;                         // of 64 along k
  int cluster;                        // blocks that share an operand: 1 or 2
  bool along_n;                       // they share a and have the same rows; else b, and the same columns
  int clusters_m, clusters_n, group;  // tiles of clusters; those of `group` rows follow each other
  int items;                          // all of them, of the whole batch
  int step_a, step_b;                 // 0: the same matrix for the whole batch
  float alpha, beta;
  GemmBias<T> bias;
  struct {  // kScatter
    T* d;
    int64_t ld;
    int m, rows;             // of the GEMM; of d
    const int32_t* indices;  // m of them; null: the first rows
    ZeroRows zeros;          // rows that may become zeros
  } scatter;
};

struct FittedMaps {
  gpu::TensorMap a, b, c, d;
};

struct FittedBarriers {
  gpu::Ring<kMostFittedStages> ring;
  gpu::Barrier landed[3];  // the addend, per warpgroup
};

/// Where a block's tile begins.
struct FittedWork {
  int row, column, batch;
};

/// kColumns of a tile: 64, 128 or 192.
template <class T, gpu::TileOrder kB, int kColumns, bool kScatter = false>
class FittedKernel {
  static constexpr gpu::TileOrder k_major = gpu::TileOrder::k_major;  // of op(A)
  static constexpr bool kHalvesK = kColumns == 64;
  static constexpr int kBytesB = kColumns * 128;
  static constexpr int kMostRows = int(most_fitted_rows(kColumns)), kMostAccumulators = kMostRows / 2;

 public:
  static constexpr int kGroups = kHalvesK ? 2 : kColumns / 64, kThreads = 128 * (1 + kGroups);
  static constexpr int kLoaders = 1 + kColumns / 64;
  static constexpr int kReleases = 4 * (kHalvesK ? 1 : kGroups);  // of a stage: by each warp that reads it
  static constexpr int kTileColumns = kColumns;
  static constexpr int kIdleWarps = 4 - kLoaders;
  static_assert(!kScatter || kIdleWarps > 0);

  __device__ __forceinline__ FittedKernel(const FittedArgs<T>& args, const FittedMaps& maps, char* stages,
                                          FittedBarriers& barriers)
      : g(args), maps_(maps), stages_(stages), ring_(barriers.ring), landed_(barriers.landed) {}

  /// Producer thread `loader`: 0 loads a, the others 64 columns of b each. One thread for all of them would
  /// take longer per stage than small tiles multiply.
  __device__ __forceinline__ void produce(int loader) const {
    const int rank = rank_in_cluster();
    int stage = 0;
    uint32_t parity = 1;
    for (int item = first_item(); item < g.items; item += step()) {
      const FittedWork work = work_of(item, rank);
      const int column = work.column + (loader - 1) * 64;
      const bool inside = loader == 0 || column < g.n;
      for (int block = 0; block < g.blocks; ++block) {
        char* const to = stages_ + stage * g.stage_bytes + (loader == 0 ? kBytesB : (loader - 1) * 8192);
        gpu::Barrier& full = ring_.full[stage];
        ring_.empty[stage].wait(parity);
        full.arrive_expect(uint32_t(loader == 0 ? g.bytes_a : inside ? g.bytes_b : 0));
        const int k = block * 64;
        const bool issues = (block & 1) == rank;  // what is shared, for both
        if (loader == 0)
          load<k_major>(to, maps_.a, full, work.row, k, work.batch * g.step_a, g.along_n, issues);
        else if (inside)
          load<kB>(to, maps_.b, full, column, k, work.batch * g.step_b, !g.along_n, issues);
        if (++stage == g.stages) stage = 0, parity ^= 1;
      }
    }
  }

  /// Idle warp `warp` of the producers' warpgroup, with kScatter.
  __device__ __forceinline__ void write_zeros(int warp) const {
    const auto& s = g.scatter;
    for (int64_t first = (int64_t(blockIdx.x) * kIdleWarps + warp) * 32; first < s.zeros.rows;
         first += int64_t(gridDim.x) * kIdleWarps * 32)
      s.zeros.write_others(first, s.indices, s.indices ? s.m : 0);
  }

  /// Consumer warpgroup `group`.
  __device__ __forceinline__ void consume(int group) {
    group_ = group, thread_ = int(threadIdx.x) % 128;
    const int panel_index = kHalvesK ? 0 : group, panel_bytes = g.rows * 128;
    char* const panel = stages_ + g.stages * g.stage_bytes + panel_index * panel_bytes;
    gpu::Barrier& landed = landed_[panel_index];
    const bool stores = !kHalvesK || group == 0, adds = g.beta != 0;
    uint32_t parity = 0;  // of `landed`
    for (int item = first_item(); item < g.items; item += step()) {
      const FittedWork work = work_of(item, rank_in_cluster());
      const int column = work.column + panel_index * 64;
      if (!kScatter && stores && thread_ == 0) {
        gpu::wait_stores_read<0>();
        if (adds) {
          landed.arrive_expect(uint32_t(panel_bytes));
          gpu::tma_load(panel, maps_.c, landed, column, work.row, work.batch);
        }
      }
      float sums[kMostAccumulators];
      multiply_rows(sums);
      if constexpr (kHalvesK) {
        if (!exchange(sums)) continue;
      }
      if (!kScatter && adds) {
        landed.wait(parity);
        parity ^= 1;
      } else {
        gpu::sync_named(1 + group_, 128);  // the last tile has left the panel
      }
      if (kScatter && adds) {
        move_rows<false>(panel, work.row, column);
        gpu::sync_named(1 + group_, 128);
      }
      fill(panel, work.batch, column, sums);
      if constexpr (kScatter) {
        gpu::sync_named(1 + group_, 128);
        move_rows<true>(panel, work.row, column);
        continue;
      }
      gpu::fence_async_shared();
      gpu::sync_named(1 + group_, 128);
      if (thread_ == 0) {
        gpu::tma_store(maps_.d, panel, column, work.row, work.batch);
        gpu::commit_stores();
      }
    }
    if (!kScatter && stores && thread_ == 0) gpu::wait_stores_read<0>();
  }

 private:
  /// 64 of k of an operand, from row (column) `at` on. `shared`: by one block for its cluster.
  template <gpu::TileOrder kOrder>
  __device__ __forceinline__ void load(char* to, const gpu::TensorMap& map, gpu::Barrier& full, int at, int k,
                                       int z, bool shared, bool issues) const {
    constexpr bool kDense = kOrder == k_major;
    const int c0 = kDense ? k : at, c1 = kDense ? at : k;
    if (g.cluster == 1 || !shared)
      gpu::tma_load(to, map, full, c0, c1, z);
    else if (issues)
      gpu::tma_load_multicast(to, map, full, 3, c0, c1, z);
  }

  __device__ __forceinline__ int rank_in_cluster() const {
    return g.cluster > 1 ? int(gpu::cluster_rank()) : 0;
  }
  __device__ __forceinline__ int first_item() const { return int(blockIdx.x) / g.cluster; }
  __device__ __forceinline__ int step() const { return int(gridDim.x) / g.cluster; }

  __device__ __forceinline__ FittedWork work_of(int item, int rank) const {
    const int tiles = g.clusters_m * g.clusters_n, batch = item / tiles, tile = item - batch * tiles;
    const int of_group = g.group * g.clusters_n, number = tile / of_group, rest = tile - number * of_group;
    const int high = min(g.group, g.clusters_m - number * g.group), across = rest / high,
              down = number * g.group + rest - across * high;
    const bool shares_b = g.cluster > 1 && !g.along_n, shares_a = g.cluster > 1 && g.along_n;
    return {min((shares_b ? down * 2 + rank : down) * g.rows, g.last_row),
            min((shares_a ? across * 2 + rank : across) * kColumns, g.last_column), batch};
  }

  __device__ __forceinline__ void release(int stage) const {
    if (threadIdx.x % 32 != 0) return;
    if (g.cluster == 1) {
      ring_.empty[stage].arrive();
    } else {
      ring_.empty[stage].arrive_remote_relaxed(0);
      ring_.empty[stage].arrive_remote_relaxed(1);
    }
  }

  /// Calls the main loop for the tile's rows.
  __device__ __forceinline__ void multiply_rows(float (&sums)[kMostAccumulators]) {
    switch (g.rows) {
#define TESSERA_ROWS(N)                                                                 \
  case N:                                                                               \
    if constexpr (N <= kMostRows) multiply<N>(reinterpret_cast<float(&)[N / 2]>(sums)); \
    break
      TESSERA_ROWS(8);
      TESSERA_ROWS(16);
      TESSERA_ROWS(24);
      TESSERA_ROWS(32);
      TESSERA_ROWS(40);
      TESSERA_ROWS(48);
      TESSERA_ROWS(56);
      TESSERA_ROWS(64);
      TESSERA_ROWS(72);
      TESSERA_ROWS(80);
      TESSERA_ROWS(88);
      TESSERA_ROWS(96);
      TESSERA_ROWS(104);
      TESSERA_ROWS(112);
      TESSERA_ROWS(120);
      TESSERA_ROWS(128);
      TESSERA_ROWS(144);
      TESSERA_ROWS(160);
      TESSERA_ROWS(176);
      TESSERA_ROWS(192);
      TESSERA_ROWS(208);
#undef TESSERA_ROWS
      default:
        __trap();  // has_fitted_tile()
    }
  }

  /// Per k-block of this warpgroup: waits for the stage, issues four k-steps, and releases the stage before,
  /// whose MMAs are complete when only the newest group is pending.
  template <int kRows>
  __device__ __forceinline__ void multiply(float (&sums)[kRows / 2]) {
    const uint32_t from = gpu::shared_address(stages_);
    const uint64_t b_tile = gpu::tile_descriptor<kB>(from + uint32_t(kHalvesK ? 0 : group_ * 8192), 8192);
    const uint64_t a_tile = gpu::tile_descriptor<k_major>(from + kBytesB);
    const int skipped = kHalvesK && stage_ % 2 != group_,
              count = kHalvesK ? (g.blocks - skipped + 1) / 2 : g.blocks;
    const int end = stage_ + g.blocks;
    int stage = stage_ + skipped, before = 0;
    uint32_t parity = parity_;
    if (stage == g.stages) stage = 0, parity ^= 1;
    for (int block = 0; block < count; ++block) {
      ring_.full[stage].wait(parity);
      const uint64_t at = uint64_t(stage * (g.stage_bytes >> 4));
      gpu::warpgroup_fence_operand(sums);
      gpu::warpgroup_arrive();
#pragma unroll
      for (int step = 0; step < 4; ++step)
        gpu::wgmma<T, kB, k_major>(sums, b_tile + at + step * gpu::kDescriptorStep<kB>,
                                   a_tile + at + step * gpu::kDescriptorStep<k_major>, block | step);
      gpu::warpgroup_commit();
      gpu::warpgroup_wait<1>();
      if (block > 0) release(before);
      before = stage;
      stage += kHalvesK ? 2 : 1;
      if (stage >= g.stages) stage -= g.stages, parity ^= 1;
    }
    gpu::warpgroup_wait<0>();
    gpu::warpgroup_fence_operand(sums);
    release(before);
    parity_ ^= uint32_t(end / g.stages) & 1;
    stage_ = end % g.stages;
  }

  /// Where this thread's sums of the second warpgroup are, in register order.
  __device__ __forceinline__ float4* other_half() const {
    return reinterpret_cast<float4*>(stages_ + g.stages * g.stage_bytes + g.rows * 128) + thread_;
  }
  /// The second warpgroup leaves its sums in shared memory. Returns whether this is the first, which finds
  /// them there.
  __device__ __forceinline__ bool exchange(const float (&sums)[kMostAccumulators]) const {
    constexpr int kHalfFree = 5, kHalfReady = 6;  // named barriers of both warpgroups
    if (group_ == 0) {
      gpu::arrive_named(kHalfFree, 256);
      gpu::sync_named(kHalfReady, 256);
      return true;
    }
    gpu::sync_named(kHalfFree, 256);
#pragma unroll
    for (int i = 0; i < kMostAccumulators / 4; ++i)
      if (i * 8 < g.rows)
        other_half()[i * 128] = make_float4(sums[i * 4], sums[i * 4 + 1], sums[i * 4 + 2], sums[i * 4 + 3]);
    gpu::arrive_named(kHalfReady, 256);
    return false;
  }

  /// alpha sums + bias (+ beta the addend that the panel holds), rounded once, into the panel: the tile's
  /// rows of 64 columns from `column` on.
  __device__ __forceinline__ void fill(char* panel, int batch, int column,
                                       const float (&sums)[kMostAccumulators]) const {
    const int lane = thread_ % 32, chunk = thread_ / 32 * 2 + lane / 8 % 2;
    const uint32_t base = gpu::shared_address(panel);
    const int first = column + thread_ / 32 * 16 + lane / 4;
    const float bias[2] = {g.bias.at(batch, first).x, g.bias.at(batch, first + 8).x};
#pragma unroll
    for (int pair = 0; pair < kMostAccumulators / 8; ++pair) {
      if (pair * 16 >= g.rows) continue;
      // If the last pair has only 8 rows, its second half repeats the first.
      const bool whole = pair * 16 + 8 < g.rows;
      const uint32_t at =
          base + gpu::swizzled_offset(pair * 16 + (whole ? lane / 16 * 8 : 0) + lane % 8, chunk);
      uint32_t words[4] = {};
      if (g.beta != 0) gpu::ldmatrix_x4_trans(words, at);
      float4 others[2] = {};
      if constexpr (kHalvesK) {
        others[0] = other_half()[pair * 256];
        if (whole) others[1] = other_half()[pair * 256 + 128];
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {  // two rows of a column each
        float low = sums[pair * 8 + i * 2], high = sums[pair * 8 + i * 2 + 1];
        if constexpr (kHalvesK) {
          const float4 other = others[i / 2];
          low += i % 2 ? other.z : other.x, high += i % 2 ? other.w : other.y;
        }
        low = fmaf(g.alpha, low, bias[i % 2]), high = fmaf(g.alpha, high, bias[i % 2]);
        if (g.beta != 0) {
          const float2 old = read_pair<T>(words[i]);
          low = fmaf(g.beta, old.x, low), high = fmaf(g.beta, old.y, high);
        }
        words[i] = make_pair<T>(low, high);
      }
      if (!whole) words[2] = words[0], words[3] = words[1];
      gpu::stmatrix_x4_trans(at, words);
    }
  }

  /// The rows of the panel, those of the GEMM from `row` on, to their places in d, or from there.
  template <bool kOut>
  __device__ __forceinline__ void move_rows(char* panel, int row, int column) const {
    const auto& s = g.scatter;
#pragma unroll 1
    for (int i = thread_; i < g.rows * 8; i += 128) {
      const int from = row + i / 8, at = column + i % 8 * 8;
      if (from >= s.m || at >= g.n) continue;
      const int to = s.indices ? __ldg(s.indices + from) : from;
      if (unsigned(to) >= unsigned(s.rows)) continue;
      T* const inside = reinterpret_cast<T*>(panel + gpu::swizzled_offset(i / 8, i % 8));
      T* const outside = s.d + to * s.ld + at;
      if (at + 8 <= g.n) {
        *reinterpret_cast<uint4*>(kOut ? outside : inside) =
            *reinterpret_cast<const uint4*>(kOut ? inside : outside);
      } else {
        for (int j = 0; j < g.n - at; ++j) (kOut ? outside : inside)[j] = (kOut ? inside : outside)[j];
      }
    }
  }

  const FittedArgs<T>& g;
  const FittedMaps& maps_;
  char* const stages_;
  gpu::Ring<kMostFittedStages>& ring_;
  gpu::Barrier* const landed_;
  int group_ = 0, thread_ = 0;
  int stage_ = 0;        // of a consumer,
  uint32_t parity_ = 0;  // and its parity
};

template <class T, gpu::TileOrder kB, int kColumns, bool kScatter>
__global__ void __launch_bounds__(FittedKernel<T, kB, kColumns>::kThreads, 1)
    fitted_kernel(const __grid_constant__ FittedMaps maps, const __grid_constant__ FittedArgs<T> g) {
  using Kernel = FittedKernel<T, kB, kColumns, kScatter>;
  extern __shared__ __align__(1024) char stages[];
  __shared__ FittedBarriers barriers;
  const int group = gpu::uniform(int(threadIdx.x) / 128) - 1;
  if (threadIdx.x == 0) {
    barriers.ring.init(Kernel::kLoaders, Kernel::kReleases * g.cluster);
    for (gpu::Barrier& landed : barriers.landed) landed.init(1);
    gpu::fence_barrier_init();
    gpu::prefetch_map(maps.a);
    gpu::prefetch_map(maps.b);
  }
  if (g.cluster > 1)
    gpu::cluster_sync();
  else
    __syncthreads();
  gpu::grid_dependency_wait();
  gpu::launch_dependents();
  Kernel kernel(g, maps, stages, barriers);
  if (group < 0) {
    gpu::warpgroup_reg_dealloc<Kernel::kGroups == 3 ? 32 : 40>();
    const int warp = gpu::uniform(int(threadIdx.x) / 32);
    if (warp < Kernel::kLoaders && gpu::elect_one()) kernel.produce(warp);
    if constexpr (kScatter)
      if (warp >= Kernel::kLoaders) kernel.write_zeros(warp - Kernel::kLoaders);
    __syncwarp();
  } else {
    gpu::warpgroup_reg_alloc<Kernel::kGroups == 3 ? 160 : 232>();
    kernel.consume(group);
  }
  if (g.cluster > 1) gpu::cluster_sync();  // a remote arrive must not reach a block that has exited
}

}  // namespace
}  // namespace tessera::ops
