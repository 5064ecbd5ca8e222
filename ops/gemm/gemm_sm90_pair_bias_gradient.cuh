#pragma once

#include "ops/gemm/gemm_sm90_bias_gradient.cuh"

/// Bias gradients next to a pair of weight gradients (gemm_sm90_pair.cuh), as gemm_sm90_bias_gradient.cuh
/// computes them next to one: dy is a of the first problem, whose rows are summed, and b of the second, which
/// is transposed, whose columns are summed; there the tiles of a tile column share the sum. It is separate
/// because a kernel for single problems has no registers left for the choice between the two.
///
/// Tile, Plan and WorkTile are those of gemm_sm90.cuh.

namespace tessera::ops {

/// The sums of a (or b) over every `tiles`-th k-block of a work tile. A lane has those of rows g and g + 8 of
/// its warp's 16 of each 64 rows, over a quarter of k: g as in gpu/wgmma.cuh.
template <class Tile>
struct PairSums {
  static constexpr int kBoxesA = Tile::kMBlocks;  // boxes of 64 rows per warpgroup
  static constexpr int kBoxesB = Tile::kN / 64 / Tile::kGroups;
  static constexpr int kBoxes = kBoxesA > kBoxesB ? kBoxesA : kBoxesB;
  static_assert(!Tile::kPingPong && !Tile::kManyAccumulators && Tile::kN % (64 * Tile::kGroups) == 0);
  int tiles, ahead;  // ahead: k-blocks before the next one to sum; larger than their number to sum none
  bool of_b = false;
  float sums[kBoxes][2] = {};

  __device__ __forceinline__ int boxes() const { return of_b ? kBoxesB : kBoxesA; }

  /// Called for each k-block in order. `row`: the warpgroup's first row in the tile.
  __device__ __forceinline__ void visit(const char* stage, int row) {
    if (--ahead >= 0) return;
    ahead = tiles - 1;
    const int lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) % 128 / 32;
    const int first = of_b ? Tile::kBytesA + row / Tile::kRows * kBoxesB * 8192 : row * 128;
    const uint32_t at = gpu::shared_address(stage) + uint32_t(first) +
                        gpu::swizzled_offset(lane / 16 * 8 + lane % 8, warp * 2 + lane / 8 % 2);
#pragma unroll
    for (int box = 0; box < kBoxes; ++box) {
      if (box >= boxes()) continue;
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        uint32_t a[4];
        gpu::ldmatrix_x4_trans(a, at + uint32_t(box * 8192 + step * 16 * 128));
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float2 pair = gpu::unpack_halves<typename Tile::T>(a[i]);
          sums[box][i % 2] += pair.x, sums[box][i % 2] += pair.y;
        }
      }
    }
  }
};

/// What a warpgroup sums of a work tile, if anything: rows from `first` on of op(A), or columns of op(B),
/// below `extent`.
struct SummedRows {
  float* to;       // null: nothing
  float* partial;  // one row of `pitch` floats per split and summing tile
  int pitch, first, extent;
  int index,
      tiles;     // index: of this tile among the `tiles` that share the rows and take k-blocks alternately
  int counters;  // index of its first counter in sums_arrived
  bool of_b;
};

template <class Tile, class Plan, class WorkTile>
__device__ __forceinline__ SummedRows summed_rows(const Plan& plan, const WorkTile& work, int group) {
  if (work.batch == 1) {
    const int index = work.m / Tile::kM, tiles = plan.template summing_tiles_b<Tile>();
    return {index < tiles ? plan.sums_b : nullptr,
            plan.partial_sums_b,
            plan.sums_b_pitch,
            work.n + group * PairSums<Tile>::kBoxesB * 64,
            plan.n,
            index,
            tiles,
            plan.sums_pitch / 64,
            true};
  }
  const int index = work.n / Tile::kN, tiles = plan.template summing_tiles<Tile>();
  return {index < tiles ? plan.sums : nullptr,
          plan.partial_sums,
          plan.sums_pitch,
          work.m + group * Tile::kRows,
          plan.m,
          index,
          tiles,
          0,
          false};
}

/// Writes the warpgroup's partial sums.
template <class Tile, class Plan, class WorkTile>
__device__ __forceinline__ void write_pair_sums(const Plan& plan, const WorkTile& work,
                                                const SummedRows& rows, const PairSums<Tile>& of) {
  const int lane = int(threadIdx.x) % 32, quad = lane % 4;
  float own = 0;  // each lane of the quad writes one of its sums
#pragma unroll
  for (int i = 0; i < 2 * of.kBoxes; ++i) {
    float sum = of.sums[i / 2][i % 2];
    sum += __shfl_xor_sync(0xFFFFFFFFu, sum, 1);
    sum += __shfl_xor_sync(0xFFFFFFFFu, sum, 2);
    if (quad == i) own = sum;
  }
  const int row = rows.first + int(threadIdx.x) % 128 / 32 * 16 + quad / 2 * 64 + lane / 4 + quad % 2 * 8;
  if (quad >= 2 * of.boxes() || rows.first >= rows.extent) return;
  const int index = rows.index * plan.splits + work.split, count = partial_sum_count(plan, work);
  float* to = rows.partial + int64_t(index) * rows.pitch + row;
  for (int i = 0; i < count; ++i, to += rows.pitch) __stcg(to, i == 0 ? own : 0.0f);
}

/// One lane of the warp of reduce_pair_sums: adds `parts` rows of partial sums, for kRows elements from
/// `rows.first + lane * kRows` on.
template <int kRows, int kTogether>
__device__ __forceinline__ void add_partial_sum_rows(const SummedRows& rows, int parts) {
  using Pack = std::conditional_t<kRows == 4, float4, float2>;
  const int row = rows.first + int(threadIdx.x) % 32 * kRows;
  const float* from = rows.partial + row;
  float sums[kRows] = {};
#pragma unroll kTogether
  for (int i = 0; i < parts; ++i, from += rows.pitch) {
    const Pack some = __ldcg(reinterpret_cast<const Pack*>(from));
    sums[0] += some.x, sums[1] += some.y;
    if constexpr (kRows == 4) sums[2] += some.z, sums[3] += some.w;
  }
#pragma unroll
  for (int i = 0; i < kRows; ++i)
    if (row + i < rows.extent) rows.to[row + i] = sums[i];
}

/// Called by the producer warpgroup, by one otherwise idle warp per consumer warpgroup (`group`). Per work
/// tile that sums an operand: waits on named barrier kSumsBarrier + group until the warpgroup has written its
/// partial sums; adds their number to the arrival counter of the 64 rows; if that completes the count, adds
/// all partial sums and writes the result. Some 2 us to L2 and back, which the epilogue hides.
template <class Tile, class Plan>
__device__ __forceinline__ void reduce_pair_sums(const Plan& plan, int group) {
  using Sums = PairSums<Tile>;
  // Elements per lane; 16 loads are in flight together.
  constexpr int kRowsA = Sums::kBoxesA * 2, kRowsB = Sums::kBoxesB * 2;
  for (int item = int(blockIdx.x) / Tile::kCluster; item < plan.items;
       item += int(gridDim.x) / Tile::kCluster) {
    const auto work =
        plan.template work_tile<Tile>(item, Tile::kCluster > 1 ? gpu::reread_cluster_rank() : 0);
    const SummedRows rows = summed_rows<Tile>(plan, work, group);
    if (!rows.to) continue;
    gpu::sync_named(Tile::kSumsBarrier + group, 160);
    if (rows.first >= rows.extent) continue;
    const int parts = rows.tiles * plan.splits;
    int arrived = 0;
    if (gpu::reread_lane() == 0) {
      int* const counter = plan.sums_arrived + rows.counters + rows.first / 64;
      const int count = partial_sum_count(plan, work);
      arrived = gpu::atomic_add_acq_rel(counter, count);
      arrived += count;
      if (arrived == parts) *counter = 0;
    }
    if (__shfl_sync(0xFFFFFFFFu, arrived, 0) != parts) continue;
    __threadfence();
    if (rows.of_b)
      add_partial_sum_rows<kRowsB, 16 / kRowsB>(rows, parts);
    else
      add_partial_sum_rows<kRowsA, 16 / kRowsA>(rows, parts);
  }
}

}  // namespace tessera::ops
