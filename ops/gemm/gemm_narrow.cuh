#pragma once

#include <algorithm>

#include "ops/gemm/gemm_narrow_split_k.cuh"

/// Narrow GEMMs by FMA: d = alpha a b + beta c + bias with small m or n (few columns, many rows), small k
/// (outer products of few terms), or small m and n and a long k (weight gradients). 2 m n k FLOPs for (m k +
/// k n + m n) elements: with a side of 16 that is at most 16 FLOPs per byte in 16 bits, far below what the
/// FMA units can do. Large ones are bound by memory, and the others, which are most, by the latency of a
/// launch, a trip to memory and the store. So: one launch, no copies of operands beforehand, and enough
/// blocks that every SM requests its share of the bytes at once.
///
/// A block of 256 threads computes a tile of d from one split of k. It loads kDepth of k of both operands
/// into shared memory as f32, MN-major whatever the order in memory: 16 bytes per load where rows are 16-byte
/// aligned, else neighbouring elements by neighbouring threads; the loads of the next kDepth are in flight
/// meanwhile, in registers. A thread accumulates 4 x 4; where a small tile does not occupy all threads,
/// groups of threads (slices) take k alternately and are added up through shared memory.
///
/// Split-K: each split writes its partial sums to scratch; the last of a group of splits to arrive adds those
/// of the group in order, and the last group those of all groups. So there is one launch, the result does not
/// depend on the order of arrival, and blocks do not wait for each other.

namespace tessera::ops {
namespace {

/// Copies a panel of an operand, kWide rows (or columns) times kDepth of k, from global to shared memory
/// through registers. "Inner" is the dimension that is dense in memory. A thread has one position along it,
/// and every `step`-th along the other.
template <class T, int kWide, int kDepth>
class NarrowPanel {
  static constexpr int kPack = gpu::kPackOf<T>, kElements = kWide * kDepth;
  static constexpr int kSlots = (kElements / kPack + kNarrowThreads - 1) / kNarrowThreads;
  static constexpr int kScalars =
      kElements > kNarrowThreads ? kElements / kNarrowThreads : 1;  // of a thread, if one at a time

 public:
  static constexpr int kFloats = kElements + kDepth / 8 * 4;

  /// The panels of rows `first` ... extent - 1 and k `begin` ... end - 1, clipped at these ends.
  __device__ __forceinline__ NarrowPanel(const NarrowOperand<T>& x, int64_t matrix, int first, int extent,
                                         int begin, int end)
      : x_(x) {
    const int number = int(threadIdx.x) * (x.packs ? kPack : 1);
    const int inner = number % inner_size(), outer = number / inner_size();
    inner_left_ = (x.k_major ? end - begin : extent - first) - inner;
    outer_left_ = (x.k_major ? extent - first : end - begin) - outer;
    from_ = x.data + matrix * x.stride + ((x.k_major ? first : begin) + outer) * x.ld +
            (x.k_major ? begin : first) + inner;
    to_ = x.k_major ? offset(inner, outer) : offset(outer, inner);
  }

  /// Offset of element (k, w) in shared memory: k-major rows. If k is dense in memory, every eighth row is
  /// followed by a gap, so that threads with neighbouring packs write to different banks.
  __device__ __forceinline__ int offset(int k, int w) const {
    return k * kWide + (x_.k_major ? k / 8 * 4 : 0) + w;
  }

  /// Loads the next kDepth of k into registers. No load is predicated, so that all are in flight together:
  /// past the ends the last row is loaded again, and store() writes zeros in its place. A pack whose first
  /// elements are inside the row lies inside the row's storage.
  __device__ __forceinline__ void load() {
    if (!x_.data) {
#pragma unroll
      for (int slot = 0; slot < kSlots; ++slot) words_[slot] = {{x_.ones, x_.ones, x_.ones, x_.ones}};
    } else if (used() && inner_left_ > 0 && outer_left_ > 0) {
      if (x_.packs) {
#pragma unroll
        for (int slot = 0; slot < kSlots; ++slot)
          words_[slot] = gpu::load_words(from_ + min(slot * step(), outer_left_ - 1) * x_.ld);
      } else {
        T raw[kScalars];
#pragma unroll
        for (int i = 0; i < kScalars; ++i) raw[i] = from_[min(i * step(), outer_left_ - 1) * x_.ld];
#pragma unroll
        for (int i = 0; i < kScalars; ++i) {
          if constexpr (sizeof(T) == 4)
            words_[i / kPack].word[i % kPack] = std::bit_cast<uint32_t>(raw[i]);
          else if (i % 2 == 0)
            words_[i / kPack].word[i % kPack / 2] =
                uint32_t(raw[i].bits) | (i + 1 < kScalars ? uint32_t(raw[i + 1].bits) << 16 : 0);
        }
      }
    }
    if (x_.k_major)
      from_ += kDepth, inner_left_ -= kDepth;
    else
      from_ += kDepth * x_.ld, outer_left_ -= kDepth;
  }

  /// Writes the panel that was loaded last to shared memory.
  __device__ __forceinline__ void store(float* shared) const {
    if (!used()) return;
    const int inner = inner_left_ + (x_.k_major ? kDepth : 0),
              outer = outer_left_ + (x_.k_major ? 0 : kDepth);
    float* const to = shared + to_;
    const int stride = x_.k_major ? step() : step() * kWide;
#pragma unroll
    for (int slot = 0; slot < kSlots; ++slot) {
      float values[kPack];
      gpu::unpack(values, words_[slot]);
      if (x_.packs) {
        const int count = slot * step() < outer ? inner : 0;
#pragma unroll
        for (int e = 0; e < kPack; ++e) values[e] = e < count ? values[e] : 0;
        if (x_.k_major) {
#pragma unroll
          for (int e = 0; e < kPack; ++e) to[slot * stride + e * kWide] = values[e];
        } else {
#pragma unroll
          for (int e = 0; e < kPack; e += 4)
            *reinterpret_cast<float4*>(to + slot * stride + e) =
                make_float4(values[e], values[e + 1], values[e + 2], values[e + 3]);
        }
      } else {
#pragma unroll
        for (int i = slot * kPack; i < (slot + 1) * kPack; ++i)
          if (i < kScalars) to[i * stride] = inner > 0 && i * step() < outer ? values[i % kPack] : 0;
      }
    }
  }

 private:
  __device__ __forceinline__ int inner_size() const {
    return x_.k_major ? kDepth : kWide;
  }
  __device__ __forceinline__ int step() const {
    return kNarrowThreads * (x_.packs ? kPack : 1) / inner_size();
  }
  /// Whether this thread copies any of the panel.
  __device__ __forceinline__ bool used() const {
    return int(threadIdx.x) * (x_.packs ? kPack : 1) < kElements;
  }

  const NarrowOperand<T>& x_;
  const T* from_;
  int to_;                       // offset of this thread's elements in shared memory
  int inner_left_, outer_left_;  // elements from this thread's position to the ends
  gpu::Words<T> words_[kSlots];
};

/// One block per (matrix, tile, split of k), the split fastest.
template <class T, int kRows, int kColumns, int kDepth>
__global__ void __launch_bounds__(kNarrowThreads, 3) narrow_kernel(const __grid_constant__ NarrowArgs<T> g) {
  using Left = NarrowPanel<T, kRows, kDepth>;
  using Right = NarrowPanel<T, kColumns, kDepth>;
  constexpr int kOutputs = kRows * kColumns, kQuads = kOutputs / 4;
  constexpr int kSlices = kNarrowThreads * 16 / kOutputs, kSlice = kOutputs / 16;  // how many, threads of one
  constexpr int kPanels = Left::kFloats + Right::kFloats, kSums = kSlices > 1 ? kNarrowThreads * 16 : 0;
  __shared__ __align__(16) float shared[kPanels > kSums ? kPanels : kSums];
  float* const left_shared = shared;
  float* const right_shared = shared + Left::kFloats;
  gpu::wait_and_launch_dependents();

  const NarrowTileCoord coord(g);
  const int tile_index = coord.tile_index, split = coord.split, matrix = coord.matrix;
  const int first_row = coord.row_tile * kRows, first_column = coord.column_tile * kColumns;
  const int rows = g.swapped ? g.n : g.m, columns = g.swapped ? g.m : g.n;
  const int slice = int(threadIdx.x) / kSlice, in_slice = int(threadIdx.x) % kSlice;
  const int row = in_slice / (kColumns / 4) * 4, column = in_slice % (kColumns / 4) * 4;  // of the tile
  const int begin = split * g.depth, end = min(g.k, begin + g.depth);

  Left left(g.left, matrix, first_row, rows, begin, end);
  Right right(g.right, matrix, first_column, columns, begin, end);
  float sums[4][4] = {};
  for (int next = begin;; next += kDepth) {
    if (next < end) {
      left.load();
      right.load();
    }
    if (next > begin) {
      const int some = min(kDepth, end - next + kDepth);
#pragma unroll 2
      for (int k = slice; k < some; k += kSlices) {
        const float4 a = *reinterpret_cast<const float4*>(left_shared + left.offset(k, row));
        const float4 b = *reinterpret_cast<const float4*>(right_shared + right.offset(k, column));
        const float of_a[4] = {a.x, a.y, a.z, a.w}, of_b[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
        for (int i = 0; i < 4; ++i)
#pragma unroll
          for (int j = 0; j < 4; ++j) sums[i][j] += of_a[i] * of_b[j];
      }
      __syncthreads();
    }
    if (next >= end) break;
    left.store(left_shared);
    right.store(right_shared);
    __syncthreads();
  }

  // Four neighbours along d's rows.
  const auto quad = [&](int i) {
    return g.swapped ? make_float4(sums[0][i], sums[1][i], sums[2][i], sums[3][i])
                     : make_float4(sums[i][0], sums[i][1], sums[i][2], sums[i][3]);
  };
  if constexpr (kSlices == 1) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (g.swapped)
        write_quad(g, matrix, first_column + column + i, first_row + row, quad(i));
      else
        write_quad(g, matrix, first_row + row + i, first_column + column, quad(i));
    }
  } else {
    constexpr int kTeam = kNarrowThreads / kQuads;  // threads that add up one quad
    float4* const quads = reinterpret_cast<float4*>(shared);
#pragma unroll
    for (int i = 0; i < 4; ++i)
      quads[slice * kQuads + (g.swapped ? (column + i) * (kRows / 4) + row / 4
                                        : (row + i) * (kColumns / 4) + column / 4)] = quad(i);
    __syncthreads();
    const int own = int(threadIdx.x) / kTeam, member = int(threadIdx.x) % kTeam;
    float4 sum = reduce_partial_sums<kTeam, kQuads, true>(quads + own, member, kSlices);
    if (g.splits > 1) {
      const int groups = (g.splits + g.group - 1) / g.group, number = split / g.group;
      const int of_group = min(g.group, g.splits - number * g.group);
      unsigned* const arrived = g.arrived + tile_index * (groups + 1);
      float4* const parts = g.parts + int64_t(tile_index) * (g.splits + groups) * kQuads + own;
      if (member == 0) __stcg(parts + split * kQuads, sum);
      if (!arrives_last(arrived + number, of_group)) return;
      sum = reduce_partial_sums<kTeam, kQuads, false>(parts + number * g.group * kQuads, member, of_group);
      if (groups > 1) {
        if (member == 0) __stcg(parts + (g.splits + number) * kQuads, sum);
        if (!arrives_last(arrived + groups, groups)) return;
        sum = reduce_partial_sums<kTeam, kQuads, false>(parts + g.splits * kQuads, member, groups);
      }
    }
    if (member != 0) return;
    constexpr int kAcross = kColumns / 4, kDown = kRows / 4;
    if (g.swapped)
      write_quad(g, matrix, first_column + own / kDown, first_row + own % kDown * 4, sum);
    else
      write_quad(g, matrix, first_row + own / kAcross, first_column + own % kAcross * 4, sum);
  }
}

}  // namespace
}  // namespace tessera::ops
