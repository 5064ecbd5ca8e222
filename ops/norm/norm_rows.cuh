#pragma once

#include "gpu/barrier.cuh"
#include "gpu/dependent_launch.cuh"
#include "gpu/grid.cuh"
#include "gpu/row.cuh"
#include "gpu/shared.cuh"
#include "ops/dropout/dropout_mask.cuh"
#include "ops/norm/norm_kernels.h"

/// Shared by both directions of the norms. They are bound by memory (a dozen operations for 4 to 16 bytes),
/// so each row must be read once, with enough loads in flight: at 3 TB/s and a latency of a microsecond some
/// 16 KB per SM. A row is held in the registers of a warp or of a block as raw words, 16 bytes per thread and
/// load. Longer rows are read by a block once per sum and once more, mostly from L2; few of them by a cluster
/// of blocks each. What was tried and measured: docs/ops/norm.md.

namespace tessera::ops::norm_rows {

using gpu::ceil_div;
using gpu::column_of;
using gpu::first_row;
using gpu::grid_of;
using gpu::kPackOf;
using gpu::kWarp;
using gpu::row_step;
using gpu::RowAccess;
using gpu::RowReduce;
using gpu::rows_at_once;
using gpu::Words;

inline constexpr int kLongSteps = 2;  // words a thread holds of a row that is read in pieces

template <class T>
T* data_or_null(const Tensor& tensor) {
  return tensor.defined() ? tensor.data<T>() : nullptr;
}
inline int64_t stride_or_0(const Tensor& tensor) {
  return tensor.defined() ? tensor.row_stride() : 0;
}

/// The mask of a residual, as kernels take it; without one it is not read.
inline DropoutDraw draw_of(const DropoutMask* drop) {
  return drop ? DropoutDraw(*drop) : DropoutDraw();
}

/// Draws the mask of a thread's share of a row (or of a piece of one) that begins at row-major index `place`:
/// bit i of lives[s] is set if element i of words s is kept. `offset`: draw.offset().
template <class T, int kThreads, int kSteps>
__device__ __forceinline__ void draw_keep_mask(uint32_t (&keep_bits)[kSteps], const DropoutDraw& draw,
                                               uint64_t offset, int64_t place, int rank) {
#pragma unroll
  for (int s = 0; s < kSteps; ++s)
    keep_bits[s] = draw.keep_bits<kPackOf<T>>(offset, place + column_of<T, kThreads>(s, rank));
}

/// Stores the mask for backward (mask_shape in norm_kernels.h): `keep_bits` of row `row`, for a piece that
/// begins `piece` whole packs into the row.
template <class T, int kThreads, int kSteps>
__device__ __forceinline__ void store_keep_mask(uint8_t* mask, const uint32_t (&keep_bits)[kSteps],
                                                int64_t row, int64_t stride, int64_t piece, int rank,
                                                int width) {
#pragma unroll
  for (int s = 0; s < kSteps; ++s)
    if (column_of<T, kThreads>(s, rank) < width)
      mask[row * stride + piece + s * kThreads + rank] = uint8_t(keep_bits[s]);
}
template <class T, int kThreads, int kSteps>
__device__ __forceinline__ void load_keep_mask(uint32_t (&keep_bits)[kSteps], const uint8_t* mask,
                                               int64_t row, int64_t stride, int64_t piece, int rank,
                                               int width) {
#pragma unroll
  for (int s = 0; s < kSteps; ++s)
    keep_bits[s] =
        column_of<T, kThreads>(s, rank) < width ? mask[row * stride + piece + s * kThreads + rank] : 0;
}

inline constexpr int kMostBlocksPerRow = 8;

/// Blocks that share a row of that width, read in pieces of `piece`: 1, 2, 4 or 8, so that few rows still
/// occupy the GPU. A function of the shape alone, as the order of the sums is.
inline int blocks_per_row(int64_t rows, int64_t width, int64_t piece) {
  constexpr int64_t kTargetBlocks = 256;
  int blocks = 1;
  while (blocks < kMostBlocksPerRow && 2 * blocks * rows <= kTargetBlocks && 2 * blocks * piece <= width)
    blocks *= 2;
  return blocks;
}

/// A row that is longer than a block's registers: the columns that are this block's of the cluster, and sums
/// over the row.
template <int kThreads, int kPiece>
class LongRow {
 public:
  static constexpr int kSums = 2;
  struct Shared {
    float scratch[RowReduce<kThreads, kSums>::kScratch], sums[2][kSums];
  };
  __device__ __forceinline__ LongRow(Shared& shared, int64_t rows, int64_t width)
      : shared_(shared),
        add_(shared.scratch),
        blocks_(uint32_t(gridDim.x / rows)),
        rank_(gpu::cluster_rank()) {
    const int64_t pieces = ceil_div(ceil_div(width, kPiece), blocks_);
    begin_ = min(int64_t(rank_) * pieces * kPiece, width);
    end_ = min(begin_ + pieces * kPiece, width);
  }
  __device__ __forceinline__ int64_t row() const { return blockIdx.x / blocks_; }
  __device__ __forceinline__ bool is_first() const { return rank_ == 0 && threadIdx.x == 0; }
  /// visit(base, columns) for the pieces of this block.
  template <class Visit>
  __device__ __forceinline__ void for_pieces(Visit&& visit) const {
    for (int64_t base = begin_; base < end_; base += kPiece)
      visit(base, int(min(end_ - base, int64_t(kPiece))));
  }
  /// Sums over all threads of the row; every one gets them.
  template <int kCount>
  __device__ __forceinline__ void sum(float (&values)[kCount]) {
    add_(values);
    if (blocks_ == 1) return;
    float* const own = shared_.sums[slot_];  // read by others until the sum after the next, or close()
    slot_ ^= 1;
    if (threadIdx.x == 0)
#pragma unroll
      for (int v = 0; v < kCount; ++v) own[v] = values[v];
    gpu::cluster_sync();
    float of[kMostBlocksPerRow][kCount];  // all are on their way before the first is added
#pragma unroll
    for (uint32_t block = 0; block < kMostBlocksPerRow; ++block)
#pragma unroll
      for (int v = 0; v < kCount; ++v)
        of[block][v] = block < blocks_
                           ? gpu::load_cluster(gpu::cluster_address(gpu::shared_address(own + v), block))
                           : 0.0f;
#pragma unroll
    for (int v = 0; v < kCount; ++v) {
      values[v] = 0;
#pragma unroll
      for (int block = 0; block < kMostBlocksPerRow; ++block) values[v] += of[block][v];
    }
  }
  /// The end of the kernel: no block leaves while another reads its sums.
  __device__ __forceinline__ void close() const {
    if (blocks_ > 1) gpu::cluster_sync();
  }

 private:
  Shared& shared_;
  RowReduce<kThreads, kSums> add_;
  uint32_t blocks_, rank_;
  int slot_ = 0;
  int64_t begin_, end_;
};

/// sum / width, rounded as the division is (Markstein's correction of a product with 1 / width), without a
/// division's slow path, whose call costs registers. NaN for an infinite sum.
__device__ __forceinline__ float mean_of(float sum, int64_t width, float inverse) {
  const float estimate = sum * inverse;
  return fmaf(fmaf(-estimate, float(width), sum), inverse, estimate);
}

}  // namespace tessera::ops::norm_rows
