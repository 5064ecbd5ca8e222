#pragma once

#include "ops/gemm/gemm_sm90_sums.cuh"

/// The sums next to a pair of weight gradients (gemm_sm90_pair.cuh), as gemm_sm90_sums.cuh makes them next to
/// one: dy is a of the first problem, whose rows are summed, and b of the second, which is transposed, whose
/// columns are; there a column of tiles shares them. A kernel for single problems has no registers for the
/// choice between the two.
///
/// Tile, Plan and Part are those of gemm_sm90.cuh.

namespace tessera::ops {

/// The sums of a (or b) over every `tiles`-th block of k of a part. A lane has those of rows g and g + 8 of
/// its warp's 16 of each 64 rows, over a quarter of k: g as in gpu/wgmma.cuh.
template <class Tile>
struct PairSums {
  static constexpr int kBoxesA = Tile::kParts;  // of 64 rows, of a warpgroup
  static constexpr int kBoxesB = Tile::kN / 64 / Tile::kGroups;
  static constexpr int kBoxes = kBoxesA > kBoxesB ? kBoxesA : kBoxesB;
  static_assert(!Tile::kPingPong && !Tile::kMany && Tile::kN % (64 * Tile::kGroups) == 0);
  int tiles, ahead;  // ahead: blocks before the next one; more than there are: none is summed
  bool of_b = false;
  float sums[kBoxes][2] = {};

  __device__ __forceinline__ int boxes() const { return of_b ? kBoxesB : kBoxesA; }

  /// Block after block. `row`: the warpgroup's first of the tile.
  __device__ __forceinline__ void visit(const char* stage, int row) {
    if (--ahead >= 0) return;
    ahead = tiles - 1;
    const int lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) % 128 / 32;
    const int first = of_b ? Tile::kBytesA + row / Tile::kRows * kBoxesB * 8192 : row * 128;
    const uint32_t at = gpu::shared_address(stage) + uint32_t(first) +
                        gpu::swizzled_place(lane / 16 * 8 + lane % 8, warp * 2 + lane / 8 % 2);
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

/// What of a part a warpgroup sums, if anything: rows first ... of op(A), or columns of op(B), up to
/// `extent`.
struct SummedRows {
  float* to;       // null: nothing
  float* partial;  // sums of a part and tile, rows of `pitch`
  int pitch, first, extent;
  int index, tiles;  // which tile of those that share the rows, and how many of them take turns along k
  int counters;      // first of its sums_arrived
  bool of_b;
};

template <class Tile, class Plan, class Part>
__device__ __forceinline__ SummedRows summed_rows(const Plan& plan, const Part& part, int group) {
  if (part.batch == 1) {
    const int index = part.m / Tile::kM, tiles = plan.template summing_b<Tile>();
    return {index < tiles ? plan.sums_b : nullptr,
            plan.partial_sums_b,
            plan.sums_b_pitch,
            part.n + group * PairSums<Tile>::kBoxesB * 64,
            plan.n,
            index,
            tiles,
            plan.sums_pitch / 64,
            true};
  }
  const int index = part.n / Tile::kN, tiles = plan.template summing<Tile>();
  return {index < tiles ? plan.sums : nullptr,
          plan.partial_sums,
          plan.sums_pitch,
          part.m + group * Tile::kRows,
          plan.m,
          index,
          tiles,
          0,
          false};
}

/// The warpgroup's part of the sums.
template <class Tile, class Plan, class Part>
__device__ __forceinline__ void write_pair_sums(const Plan& plan, const Part& part, const SummedRows& rows,
                                                const PairSums<Tile>& of) {
  const int lane = int(threadIdx.x) % 32, quad = lane % 4;
  float own = 0;  // of the quad's sums each lane takes one
#pragma unroll
  for (int i = 0; i < 2 * of.kBoxes; ++i) {
    float sum = of.sums[i / 2][i % 2];
    sum += __shfl_xor_sync(0xFFFFFFFFu, sum, 1);
    sum += __shfl_xor_sync(0xFFFFFFFFu, sum, 2);
    if (quad == i) own = sum;
  }
  const int row = rows.first + int(threadIdx.x) % 128 / 32 * 16 + quad / 2 * 64 + lane / 4 + quad % 2 * 8;
  if (quad >= 2 * of.boxes() || rows.first >= rows.extent) return;
  const int place = rows.index * plan.splits + part.split, weight = weight_of_sums(plan, part);
  float* to = rows.partial + int64_t(place) * rows.pitch + row;
  for (int i = 0; i < weight; ++i, to += rows.pitch) __stcg(to, i == 0 ? own : 0.0f);
}

/// A lane of the warp below: adds up `parts` rows of partial sums of kRows rows from `first + lane * kRows`
/// on.
template <int kRows, int kTogether>
__device__ __forceinline__ void add_parts_of_sums(const SummedRows& rows, int parts) {
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

/// A warp that has nothing else to do waits for the parts that warpgroup `group` writes and, where they are
/// the last of their rows, adds all up: some 2 us to L2 and back, under the epilogue.
template <class Tile, class Plan>
__device__ __forceinline__ void add_pair_sums(const Plan& plan, int group) {
  using Sums = PairSums<Tile>;
  // A lane's rows; 16 loads of a number are in flight together.
  constexpr int kRowsA = Sums::kBoxesA * 2, kRowsB = Sums::kBoxesB * 2;
  for (int item = int(blockIdx.x) / Tile::kCluster; item < plan.items;
       item += int(gridDim.x) / Tile::kCluster) {
    const auto part = plan.template part<Tile>(item, Tile::kCluster > 1 ? gpu::reread_cluster_rank() : 0);
    const SummedRows rows = summed_rows<Tile>(plan, part, group);
    if (!rows.to) continue;
    gpu::sync_named(3 + group, 160);
    if (rows.first >= rows.extent) continue;
    const int parts = rows.tiles * plan.splits;
    int come = 0;
    if (gpu::reread_lane() == 0) {
      int* const there = plan.sums_arrived + rows.counters + rows.first / 64;
      const int weight = weight_of_sums(plan, part);
      come = gpu::add_acquire_release(there, weight);
      come += weight;
      if (come == parts) *there = 0;
    }
    if (__shfl_sync(0xFFFFFFFFu, come, 0) != parts) continue;
    __threadfence();
    if (rows.of_b)
      add_parts_of_sums<kRowsB, 16 / kRowsB>(rows, parts);
    else
      add_parts_of_sums<kRowsA, 16 / kRowsA>(rows, parts);
  }
}

}  // namespace tessera::ops
