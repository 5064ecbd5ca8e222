#pragma once

#include "gpu/launch.cuh"
#include "gpu/mma.cuh"
#include "gpu/reread.cuh"
#include "tensor/dtype.h"

/// Tiles of 16-bit rows in shared memory and the GEMMs of a warp with them. T is bf16 or f16; kD, the row
/// length, is 32, 64, 96 or 128; a warp owns kM times 16 rows of the left operand.
///
/// Swizzle: a tile is rows of kD / 8 chunks of 16 bytes without padding; chunk c of row r lies at c ^ (r %
/// 8), or at c ^ (r / 2 % 4) where kD / 8 is only a multiple of 4. The eight rows that one phase of ldmatrix
/// reads at one logical chunk then lie in eight different groups of four banks. Tiles start at multiples of
/// 1024 bytes.

namespace tessera::ops {

/// Offset in elements of chunk `chunk` of row `row`.
template <int kD>
__device__ __forceinline__ int tile_offset(int row, int chunk) {
  constexpr int kChunks = kD / 8;
  const int place = kChunks % 8 == 0 ? chunk ^ (row % 8) : chunk ^ (row / 2 % 4);
  return row * kD + place * 8;
}

/// From the address of a chunk, the address of the chunk 2 k further in the same row of a tile that starts at
/// a multiple of the row's bytes: k is known at compile time, so this takes at most two instructions.
template <int kD>
__device__ __forceinline__ uint32_t skip_chunks(uint32_t address, int k) {
  if constexpr (kD / 8 % 8 == 0) return address ^ uint32_t(k * 32);
  return (address ^ uint32_t(k % 2 * 32)) + uint32_t(k / 2 * 64);
}

/// Issues the copy of kRows rows to a tile by kThreads threads: zeros beyond `rows` rows and `dim` columns.
/// All chunks of a thread have the same swizzle, so that it computes one address.
template <int kD, int kRows, int kThreads, class T>
__device__ __forceinline__ void load_tile(T* tile, const T* from, int64_t stride, int rows, int dim) {
  constexpr int kLanes = kD / 8 % 8 == 0 ? 8 : 4;  // lanes per row, one chunk each
  constexpr int kRowStep = kThreads / kLanes;      // a multiple of 8
  static_assert(kRows % kRowStep == 0 && kRowStep % 8 == 0);
  const int thread = gpu::reread_thread();
  const int row = thread / kLanes, chunk = thread % kLanes;
  const uint32_t to = gpu::shared_address(tile) + 2 * uint32_t(tile_offset<kD>(row, chunk));
  const T* source = from + row * stride + chunk * 8;
#pragma unroll
  for (int i = 0; i < kRows / kRowStep; ++i) {
#pragma unroll
    for (int j = 0; j < kD / 8 / kLanes; ++j) {
      const bool valid = row + i * kRowStep < rows && (chunk + j * kLanes) * 8 < dim;
      gpu::cp_async_16(to + 2 * uint32_t(i * kRowStep * kD + j * kLanes * 8), source + j * kLanes * 8, valid);
    }
    source += kRowStep * stride;
  }
}

/// The left operand of a GEMM: kM * 16 rows of a tile from `row` on, held in registers or read at each use.
template <int kD, int kM, bool kInRegisters>
class RowOperand {
 public:
  template <class T>
  __device__ __forceinline__ RowOperand(const T* tile, int row) {
    const int lane = int(threadIdx.x) % 32;
    address_ = gpu::shared_address(tile) + 2 * uint32_t(tile_offset<kD>(row + lane % 16, lane / 16));
  }
  /// Loads the fragments, if they are held in registers: after the tile has landed, before the first get().
  __device__ __forceinline__ void load_fragments() {
    if constexpr (kInRegisters) {
#pragma unroll
      for (int k = 0; k < kD / 16; ++k) fetch(k, fragments_[k]);
    }
  }
  /// Columns 16 k ... 16 k + 15.
  __device__ __forceinline__ void get(int k, uint32_t (&a)[kM][4]) const {
    if constexpr (kInRegisters) {
#pragma unroll
      for (int m = 0; m < kM; ++m)
#pragma unroll
        for (int i = 0; i < 4; ++i) a[m][i] = fragments_[k][m][i];
    } else {
      fetch(k, a);
    }
  }

 private:
  __device__ __forceinline__ void fetch(int k, uint32_t (&a)[kM][4]) const {
#pragma unroll
    for (int m = 0; m < kM; ++m)
      gpu::ldmatrix_x4(a[m], skip_chunks<kD>(address_, k) + 2 * uint32_t(m * 16 * kD));
  }
  uint32_t fragments_[kInRegisters ? kD / 16 : 1][kM][4];
  uint32_t address_;
};

/// acc [kM * 16, kN * 8] += A B^T: A the operand, B the kN * 8 rows of a tile from `row` (a multiple of 8)
/// on.
template <class T, int kD, int kM, int kN, bool kInRegisters>
__device__ __forceinline__ void gemm_abt(float (&acc)[kM][kN][4], const RowOperand<kD, kM, kInRegisters>& a,
                                         const T* tile, int row) {
  static_assert(kN % 2 == 0);
  const int lane = int(threadIdx.x) % 32;
  // Matrices of one ldmatrix: rows 0-7 and 8-15 (lane / 16) by columns 0-7 and 8-15 (lane / 8 % 2).
  const int own_row = lane / 16 * 8 + lane % 8, half = lane / 8 % 2;
  const uint32_t base = gpu::shared_address(tile) + 2 * uint32_t(row * kD + tile_offset<kD>(own_row, half));
#pragma unroll
  for (int k = 0; k < kD / 16; ++k) {
    uint32_t left[kM][4];
    a.get(k, left);
    const uint32_t column = skip_chunks<kD>(base, k);
#pragma unroll
    for (int n = 0; n < kN / 2; ++n) {
      uint32_t right[4];
      gpu::ldmatrix_x4(right, column + 2 * uint32_t(n * 16 * kD));
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        gpu::mma_m16n8k16<T>(acc[m][2 * n], left[m], right[0], right[1]);
        gpu::mma_m16n8k16<T>(acc[m][2 * n + 1], left[m], right[2], right[3]);
      }
    }
  }
}

/// acc [kM * 16, kD] += A B: A [kM * 16, kK * 16] in registers, B the kK * 16 rows of a tile from `row` on.
template <class T, int kD, int kM, int kK>
__device__ __forceinline__ void gemm_ab(float (&acc)[kM][kD / 8][4], const uint32_t (&a)[kM][kK][4],
                                        const T* tile, int row) {
  const int lane = int(threadIdx.x) % 32;
  const int own_row = lane % 16, half = lane / 16;
  const uint32_t base = gpu::shared_address(tile) + 2 * uint32_t(row * kD + tile_offset<kD>(own_row, half));
#pragma unroll
  for (int k = 0; k < kK; ++k) {
#pragma unroll
    for (int n = 0; n < kD / 16; ++n) {
      uint32_t right[4];
      gpu::ldmatrix_x4_trans(right, skip_chunks<kD>(base, n) + 2 * uint32_t(k * 16 * kD));
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        gpu::mma_m16n8k16<T>(acc[m][2 * n], a[m][k], right[0], right[1]);
        gpu::mma_m16n8k16<T>(acc[m][2 * n + 1], a[m][k], right[2], right[3]);
      }
    }
  }
}

/// Accumulators of 2 kK neighbouring 8-column blocks, rounded to T, as a left operand: the two layouts agree.
template <class T, int kM, int kK>
__device__ __forceinline__ void to_operand(uint32_t (&a)[kM][kK][4], const float (&acc)[kM][2 * kK][4]) {
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int k = 0; k < kK; ++k) {
      a[m][k][0] = gpu::pack_halves<T>(acc[m][2 * k][0], acc[m][2 * k][1]);
      a[m][k][1] = gpu::pack_halves<T>(acc[m][2 * k][2], acc[m][2 * k][3]);
      a[m][k][2] = gpu::pack_halves<T>(acc[m][2 * k + 1][0], acc[m][2 * k + 1][1]);
      a[m][k][3] = gpu::pack_halves<T>(acc[m][2 * k + 1][2], acc[m][2 * k + 1][3]);
    }
}

/// Writes the warp's accumulators, row half (m, hh) times factor[m][hh], to global rows, through the warp's
/// own rows of a tile (from `row` on; no other warp may still read them), so that each store is 16 bytes.
/// `rows` counts from the tile's first row, which is that of `to`.
template <int kD, int kM, class T>
__device__ __forceinline__ void store_rows(const float (&acc)[kM][kD / 8][4], const float (&factor)[kM][2],
                                           T* tile, int row, T* to, int64_t stride, int rows, int dim) {
  const int lane = int(threadIdx.x) % 32;
  __syncwarp();
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int hh = 0; hh < 2; ++hh)
#pragma unroll
      for (int n = 0; n < kD / 8; ++n) {
        const int place = tile_offset<kD>(row + m * 16 + hh * 8 + lane / 4, n) + lane % 4 * 2;
        *reinterpret_cast<uint32_t*>(tile + place) =
            gpu::pack_halves<T>(acc[m][n][2 * hh] * factor[m][hh], acc[m][n][2 * hh + 1] * factor[m][hh]);
      }
  __syncwarp();
  constexpr int kChunks = kD / 8;
#pragma unroll
  for (int i = 0; i < kM * 16 * kChunks / 32; ++i) {
    const int index = i * 32 + lane, own = row + index / kChunks, chunk = index % kChunks;
    if (own < rows && chunk * 8 < dim)
      *reinterpret_cast<uint4*>(to + own * stride + chunk * 8) =
          *reinterpret_cast<const uint4*>(tile + tile_offset<kD>(own, chunk));
  }
}

}  // namespace tessera::ops
