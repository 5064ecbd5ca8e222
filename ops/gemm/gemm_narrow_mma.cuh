#pragma once

#include <algorithm>

#include "gpu/halves.cuh"
#include "gpu/mma.cuh"
#include "ops/gemm/gemm_narrow_split_k.cuh"

/// Narrow GEMMs of 16-bit matrices on the tensor cores. Operands are copied to shared memory unchanged, 16
/// bytes per cp.async (zeros past the end of k), in three stages, and read from there by ldmatrix, transposed
/// for MN-major operands, for mma.m16n8k16. So nothing is converted, and a byte costs a sixteenth of an
/// instruction: memory is the bound. Rows that do not start on 16-byte boundaries are copied element by
/// element.
///
/// A block of 256 threads computes a tile of d from one split of k; small tiles have a large kDepth, and
/// their warps divide k among them (sliced-K). The accumulators are exchanged through shared memory into rows
/// of d, so that neighbouring threads store neighbouring bytes. Split-K: gemm_narrow_split_k.cuh.

namespace tessera::ops {
namespace {

/// Copies a panel of an operand, kWide rows (or columns) times kDepth of k, to shared memory: there it is
/// lines of up to 64 elements of the dense dimension ("inner"), whose 16-byte chunks are swizzled so that
/// eight rows of one column are in different banks. A thread has one chunk along a line and every kPass-th
/// line.
template <class T, int kWide, int kDepth, bool kKMajor>
class MmaPanel {
  static constexpr int kInner = kKMajor ? kDepth : kWide, kOuter = kKMajor ? kWide : kDepth;
  static constexpr int kChunks = kInner / 8, kLine = std::min(kChunks, 8);
  static constexpr int kPass = kNarrowThreads / kChunks, kPasses = (kOuter + kPass - 1) / kPass;
  static_assert(kPass % 8 == 0);  // the swizzle is the same in all of them

 public:
  static constexpr int kBytes = kWide * kDepth * 2;

  /// Rows `first` ..., of which `wide` exist; k from `begin` on, of which `left` exist.
  __device__ __forceinline__ MmaPanel(const NarrowOperand<T>& x, int matrix, int first, int wide, int begin,
                                      int left)
      : x_(x), wide_(wide), left_(left) {
    from_ = x.data + matrix * x.stride + (kKMajor ? first : begin) * x.ld + (kKMajor ? begin : first);
    if (x.packs) from_ += outer() * x.ld + chunk() * 8;
  }

  static __device__ __forceinline__ uint32_t offset(int outer, int chunk) {
    const int swizzled = chunk % kLine ^ (outer * kLine / 8 & (kLine - 1));
    return uint32_t(((chunk / kLine * kOuter + outer) * kLine + swizzled) * 16);
  }

  /// Issues the copies of the next kDepth of k.
  __device__ __forceinline__ void load(uint32_t to) {
    const int deep = min((left_ + 15) & ~15, kDepth);  // the k that the MMAs read
    if (x_.packs) {
      const int inside = (kKMajor ? left_ : wide_) - chunk() * 8, some = min(max(inside, 0), 8) * 2;
      const int count = (kKMajor ? min(wide_, kWide) : deep) - outer();
      if (chunk() * 8 < (kKMajor ? deep : wide_)) {
        const T* at = from_;
        to += offset(outer(), chunk());
#pragma unroll
        for (int i = 0; i < kPasses; ++i) {
          const int bytes = kKMajor || i * kPass < left_ - outer() ? some : 0;
          if (i * kPass < count)
            gpu::cp_async_zfill(to + i * kPass * kLine * 16, bytes > 0 ? at : x_.data, bytes);
          at += kPass * x_.ld;
        }
      }
    } else {
      constexpr int kTogether = 8;
      const int lanes = 1 << x_.lanes_log, all = min(kOuter, kKMajor ? wide_ : deep) << x_.lanes_log;
#pragma unroll 1
      for (int begin = int(threadIdx.x); begin < all; begin += kTogether * kNarrowThreads) {
        uint16_t raw[kTogether];
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
          const int number = begin + i * kNarrowThreads;
          const int outer = number >> x_.lanes_log, inner = number & (lanes - 1);
          raw[i] = 0;
          if (number < all && (kKMajor ? inner : outer) < left_ && (kKMajor ? outer : inner) < wide_)
            raw[i] = from_[outer * x_.ld + inner].bits;
        }
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
          const int number = begin + i * kNarrowThreads;
          const int outer = number >> x_.lanes_log, inner = number & (lanes - 1);
          if (number < all) gpu::store_shared(to + offset(outer, inner / 8) + inner % 8 * 2, raw[i]);
        }
      }
    }
    from_ += kKMajor ? int64_t(kDepth) : kDepth * x_.ld;
    left_ -= kDepth;
  }

 private:
  static __device__ __forceinline__ int outer() {
    return int(threadIdx.x) / kChunks;
  }
  static __device__ __forceinline__ int chunk() {
    return int(threadIdx.x) % kChunks;
  }

  const NarrowOperand<T>& x_;
  const T* from_;
  int wide_, left_;
};

template <bool kTransposed>
__device__ __forceinline__ void load_fragment(uint32_t (&r)[4], uint32_t row) {
  if constexpr (kTransposed)
    gpu::ldmatrix_x4_trans(r, row);
  else
    gpu::ldmatrix_x4(r, row);
}

/// Floats of one copy of a tile's sums in shared memory, stored by rows or by columns of d.
constexpr int staged_sums(const NarrowMmaTile& tile) {
  return std::max((tile.rows + 8) * tile.columns, (tile.columns + 8) * tile.rows);
}
/// Shared memory of a block that sums `depth` of k: a single stage for a short k, if that stays within what a
/// launch may have without an opt-in. (A launch that needs much more than the one before it waits for that
/// one to end, because the split of the SM's memory between L1 and shared memory changes.)
constexpr size_t narrow_bytes(const NarrowMmaTile& tile, int depth) {
  const size_t stage = size_t((tile.rows + tile.columns) * tile.depth * 2),
               sums = size_t(staged_sums(tile) * 4 * (8 / tile.down / tile.across)),
               few = std::max(stage, sums);
  return depth <= tile.depth && few <= 32 * 1024 ? few : kNarrowStages * stage;
}

/// One block per (matrix, tile, split of k), the split fastest.
template <class T, int kIndex, bool kLeftKMajor, bool kRightKMajor>
__global__ void __launch_bounds__(kNarrowThreads) narrow_mma_kernel(const __grid_constant__ NarrowArgs<T> g) {
  constexpr NarrowMmaTile kTile = kNarrowMmaTiles[kIndex];
  constexpr int kM = kTile.rows, kN = kTile.columns, kDepth = kTile.depth, kStages = kNarrowStages;
  constexpr int kDown = kTile.down, kAcross = kTile.across, kWarpsK = 8 / kDown / kAcross;
  constexpr int kRows = kM / kDown, kColumns = kN / kAcross;  // of a warp
  constexpr int kA = kRows / 16, kB = (kColumns + 15) / 16;   // fragments
  using Left = MmaPanel<T, kM, kDepth, kLeftKMajor>;
  using Right = MmaPanel<T, kN, kDepth, kRightKMajor>;
  constexpr int kStage = Left::kBytes + Right::kBytes;
  extern __shared__ __align__(128) char shared[];
  gpu::wait_and_launch_dependents();

  const NarrowTileCoord coord(g);
  const int tile_index = coord.tile_index, split = coord.split, matrix = coord.matrix;
  const int first_row = coord.row_tile * kM, first_column = coord.column_tile * kN;
  const int rows = (g.swapped ? g.n : g.m) - first_row, columns = (g.swapped ? g.m : g.n) - first_column;
  const int begin = split * g.depth, deep = min(g.k - begin, g.depth);
  Left left(g.left, matrix, first_row, rows, begin, deep);
  Right right(g.right, matrix, first_column, columns, begin, deep);
  const uint32_t base = gpu::shared_address(shared);
  const int lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) / 32;
  const int warp_k = warp % kWarpsK, warp_row = warp / kWarpsK % kDown * kRows,
            warp_column = warp / kWarpsK / kDown * kColumns;

  // 1. Main loop, kNarrowStages deep.
  const auto load = [&](int stage) {
    const uint32_t to = base + uint32_t(stage * kStage);
    left.load(to);
    right.load(to + Left::kBytes);
  };
  float sums[kA][kB * 2][4] = {};
#pragma unroll
  for (int stage = 0; stage < kStages - 1; ++stage) {
    if (stage * kDepth < deep) load(stage);
    gpu::cp_async_commit();
  }
  int stage = 0, ahead = kStages - 1;
  for (int from = 0; from < deep; from += kDepth) {
    gpu::cp_async_wait<kStages - 2>();
    __syncthreads();
    if (from + (kStages - 1) * kDepth < deep) load(ahead);
    gpu::cp_async_commit();
    const uint32_t of_left = base + uint32_t(stage * kStage), of_right = of_left + Left::kBytes;
    const int some = min(deep - from, kDepth);
#pragma unroll
    for (int step = 0; step < kDepth / 16 / kWarpsK; ++step) {
      const int k = (step * kWarpsK + warp_k) * 16;
      if (k >= some) break;
      uint32_t a[kA][4], b[kB][4];
#pragma unroll
      for (int i = 0; i < kA; ++i) {
        const int row = warp_row + i * 16;
        load_fragment<!kLeftKMajor>(
            a[i],
            of_left + (kLeftKMajor ? Left::offset(row + lane % 16, k / 8 + lane / 16)
                                   : Left::offset(k + lane % 8 + lane / 16 * 8, row / 8 + lane / 8 % 2)));
      }
#pragma unroll
      for (int i = 0; i < kB; ++i) {
        const int column = warp_column + i * 16, second = kColumns < 16 ? 0 : lane / 16;
        load_fragment<!kRightKMajor>(
            b[i],
            of_right + (kRightKMajor ? Right::offset(column + lane % 8 + second * 8, k / 8 + lane / 8 % 2)
                                     : Right::offset(k + lane % 16, column / 8 + second)));
      }
#pragma unroll
      for (int i = 0; i < kA; ++i)
#pragma unroll
        for (int j = 0; j < kColumns / 8; ++j)
          gpu::mma_m16n8k16<T>(sums[i][j], a[i], b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
    }
    stage = stage + 1 == kStages ? 0 : stage + 1;
    ahead = ahead + 1 == kStages ? 0 : ahead + 1;
  }
  gpu::cp_async_wait<0>();
  __syncthreads();

  // 2. Accumulators to shared memory as rows of d, one copy per warp along k; `whole` adds the copies,
  // `write` stores four elements of d with bias and beta c.
  constexpr int kMost = staged_sums(kTile);
  static_assert(kMost * kWarpsK * 4 <= kStages * kStage);
  float* const staged = reinterpret_cast<float*>(shared);
  const int pitch = g.swapped ? kM + 4 : kN + 8;
#pragma unroll
  for (int i = 0; i < kA; ++i)
#pragma unroll
    for (int j = 0; j < kColumns / 8; ++j)
#pragma unroll
      for (int down = 0; down < 2; ++down) {
        const int r = warp_row + i * 16 + lane / 4 + down * 8, c = warp_column + j * 8 + lane % 4 * 2;
        const float low = sums[i][j][down * 2], high = sums[i][j][down * 2 + 1];
        if (g.swapped) {
          staged[warp_k * kMost + c * pitch + r] = low;
          staged[warp_k * kMost + (c + 1) * pitch + r] = high;
        } else {
          *reinterpret_cast<float2*>(staged + warp_k * kMost + r * pitch + c) = make_float2(low, high);
        }
      }
  __syncthreads();

  constexpr int kQuads = kM * kN / 4, kTeam = kQuads < kNarrowThreads ? kNarrowThreads / kQuads : 1;
  constexpr int kOwn = kQuads > kNarrowThreads ? kQuads / kNarrowThreads : 1;
  const int quads_across = (g.swapped ? kM : kN) / 4, member = int(threadIdx.x) % kTeam;
  const int d_row = g.swapped ? first_column : first_row, d_column = g.swapped ? first_row : first_column;
  const auto quad_of = [&](int own) { return (int(threadIdx.x) + own * kNarrowThreads) / kTeam; };
  const auto whole = [&](int own) {
    const int quad = quad_of(own), row = quad / quads_across, column = quad % quads_across * 4;
    float4 sum = *reinterpret_cast<const float4*>(staged + row * pitch + column);
#pragma unroll
    for (int other = 1; other < kWarpsK; ++other)
      add_to(sum, *reinterpret_cast<const float4*>(staged + other * kMost + row * pitch + column));
    return sum;
  };
  const auto write = [&](int own, const float4& sum) {
    const int quad = quad_of(own), row = quad / quads_across, column = quad % quads_across * 4;
    if (member == 0) write_quad(g, matrix, d_row + row, d_column + column, sum);
  };
  // 3. Not split: store d.
  if (g.splits == 1) {
#pragma unroll
    for (int own = 0; own < kOwn; ++own) write(own, whole(own));
    return;
  }
  // 4. Split-K: partial sums to scratch; the last block of a group of splits reduces those of its group, the
  // last group to finish those of the groups, and stores d.
  const int groups = (g.splits + g.group - 1) / g.group, number = split / g.group;
  const int of_group = min(g.group, g.splits - number * g.group);
  unsigned* const arrived = g.arrived + tile_index * (groups + 1);
  float4* const parts = g.parts + int64_t(tile_index) * (g.splits + groups) * kQuads;
#pragma unroll
  for (int own = 0; own < kOwn; ++own) {
    const float4 sum = whole(own);
    if (member == 0) __stcg(parts + split * kQuads + quad_of(own), sum);
  }
  if (!arrives_last(arrived + number, of_group)) return;
  for (int own = 0; own < kOwn; ++own) {
    const float4 sum = reduce_partial_sums<kTeam, kQuads, false>(
        parts + number * g.group * kQuads + quad_of(own), member, of_group);
    if (groups == 1)
      write(own, sum);
    else if (member == 0)
      __stcg(parts + (g.splits + number) * kQuads + quad_of(own), sum);
  }
  if (groups == 1 || !arrives_last(arrived + groups, groups)) return;
  for (int own = 0; own < kOwn; ++own)
    write(own, reduce_partial_sums<kTeam, kQuads, false>(parts + g.splits * kQuads + quad_of(own), member,
                                                         groups));
}

}  // namespace
}  // namespace tessera::ops
