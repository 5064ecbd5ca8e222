#pragma once

#include "gpu/mma.cuh"
#include "gpu/mma_tf32.cuh"
#include "gpu/reread.cuh"

/// Tiles of f32 rows in shared memory and the GEMMs of a warp with them, on tensor cores in TF32. A tile is
/// rounded (cvt.rna) in shared memory once it has landed, by the threads that copied it; operands in
/// registers are rounded there. kD, the row length, is 32, 64, 96 or 128; a warp owns kM times 16 rows of the
/// left operand.
///
/// Rows are padded by 4 floats. The eight 16-byte words that one phase of ldmatrix reads (one per row) then
/// lie in eight different groups of four banks, and so do the 8-byte words of rows 0, 2, 4, 6 that gemm_ab
/// reads.
///
/// An 8x8 matrix of 16-bit elements, as ldmatrix moves it, is 8 rows of four floats: lane l gets float l % 4
/// of row l / 4, as m16n8k8 expects K-major operands. A right operand with k along the rows cannot be loaded
/// that way (ldmatrix transposes 16 bits at a time): its rows are read in 8-byte words instead, and the order
/// of k and of the columns is permuted to fit, see gemm_ab.

namespace tessera::ops::tf32 {

template <int kD>
inline constexpr int kPitch = kD + 4;  // floats

/// Starts the copy of kRows rows to a tile by kThreads threads: zeros beyond `rows` rows and `dim` columns.
template <int kD, int kRows, int kThreads>
__device__ __forceinline__ void load_tile(float* tile, const float* from, int64_t stride, int rows, int dim) {
  constexpr int kLanes = 8, kRowStep = kThreads / kLanes;  // lanes per row, 16 bytes each
  static_assert(kRows % kRowStep == 0 && kD % 32 == 0);
  const int thread = gpu::reread_thread();
  const int row = thread / kLanes, chunk = thread % kLanes;
  const uint32_t to = gpu::shared_address(tile) + 4 * uint32_t(row * kPitch<kD> + chunk * 4);
  const float* source = from + row * stride + chunk * 4;
#pragma unroll
  for (int i = 0; i < kRows / kRowStep; ++i) {
#pragma unroll
    for (int j = 0; j < kD / 32; ++j) {
      const bool valid = row + i * kRowStep < rows && (chunk + j * kLanes) * 4 < dim;
      gpu::cp_async_16(to + 4 * uint32_t(i * kRowStep * kPitch<kD> + j * 32), valid ? source + j * 32 : from,
                       valid);
    }
    source += kRowStep * stride;
  }
}

/// Rounds what this thread's load_tile with the same arguments copied: after its copies have landed
/// (cp_async_wait), before the barrier that publishes the tile.
template <int kD, int kRows, int kThreads>
__device__ __forceinline__ void round_tile(float* tile) {
  constexpr int kLanes = 8, kRowStep = kThreads / kLanes;
  const int thread = gpu::reread_thread();
  float* const own = tile + thread / kLanes * kPitch<kD> + thread % kLanes * 4;
#pragma unroll
  for (int i = 0; i < kRows / kRowStep; ++i)
#pragma unroll
    for (int j = 0; j < kD / 32; ++j) {
      uint4* const at = reinterpret_cast<uint4*>(own + i * kRowStep * kPitch<kD> + j * 32);
      const uint4 x = *at;
      *at = {gpu::to_tf32(x.x), gpu::to_tf32(x.y), gpu::to_tf32(x.z), gpu::to_tf32(x.w)};
    }
}

/// The left operand of a GEMM: kM * 16 rows of a tile from `row` on, held in registers or read at each use.
template <int kD, int kM, bool kInRegisters>
class RowOperand {
 public:
  __device__ __forceinline__ RowOperand(const float* tile, int row) {
    const int lane = int(threadIdx.x) % 32;
    address_ = gpu::shared_address(tile) + 4 * uint32_t((row + lane % 16) * kPitch<kD> + lane / 16 * 4);
  }
  /// Loads the fragments, if they are held in registers: after the tile has landed, before the first get().
  __device__ __forceinline__ void load_fragments() {
    if constexpr (kInRegisters) {
#pragma unroll
      for (int k = 0; k < kD / 8; ++k) fetch(k, fragments_[k]);
    }
  }
  /// Columns 8 k ... 8 k + 7.
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
    for (int m = 0; m < kM; ++m) gpu::ldmatrix_x4(a[m], address_ + 4 * uint32_t(m * 16 * kPitch<kD> + k * 8));
  }
  uint32_t fragments_[kInRegisters ? kD / 8 : 1][kM][4];
  uint32_t address_;
};

/// acc [kM * 16, kN * 8] += A B^T: A the operand, B the kN * 8 rows of a tile from `row` on.
template <int kD, int kM, int kN, bool kInRegisters>
__device__ __forceinline__ void gemm_abt(float (&acc)[kM][kN][4], const RowOperand<kD, kM, kInRegisters>& a,
                                         const float* tile, int row) {
  static_assert(kN % 2 == 0);
  const int lane = int(threadIdx.x) % 32;
  // Matrices of one ldmatrix: rows 0-7 and 8-15 (lane / 16) by columns 0-3 and 4-7 (lane / 8 % 2).
  const uint32_t base = gpu::shared_address(tile) +
                        4 * uint32_t((row + lane / 16 * 8 + lane % 8) * kPitch<kD> + lane / 8 % 2 * 4);
#pragma unroll
  for (int k = 0; k < kD / 8; ++k) {
    uint32_t left[kM][4];
    a.get(k, left);
#pragma unroll
    for (int n = 0; n < kN / 2; ++n) {
      uint32_t right[4];
      gpu::ldmatrix_x4(right, base + 4 * uint32_t(n * 16 * kPitch<kD> + k * 8));
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        gpu::mma_m16n8k8_tf32(acc[m][2 * n], left[m], right[0], right[1]);
        gpu::mma_m16n8k8_tf32(acc[m][2 * n + 1], left[m], right[2], right[3]);
      }
    }
  }
}

/// acc [kM * 16, kD] += A B: A [kM * 16, kK * 8] as accumulators, B the kK * 8 rows of a tile from `row` on.
///
/// A sum does not depend on the order of k: column t of the instruction's left operand is column 2 t of A,
/// and t + 4 is 2 t + 1, which are the accumulators of the lane itself. Column c of blocks 2 j and 2 j + 1 of
/// the result is column 16 j + 2 c and 16 j + 2 c + 1, so that the lane reads its right operands for both in
/// one word of 8 bytes: acc[.][2 j + p][e] is column 16 j + 4 t + 2 (e % 2) + p.
template <int kD, int kM, int kK>
__device__ __forceinline__ void gemm_ab(float (&acc)[kM][kD / 8][4], const float (&a)[kM][kK][4],
                                        const float* tile, int row) {
  const int lane = int(threadIdx.x) % 32;
  const float* const base = tile + (row + lane % 4 * 2) * kPitch<kD> + lane / 4 * 2;
#pragma unroll
  for (int k = 0; k < kK; ++k) {
    uint32_t left[kM][4];
#pragma unroll
    for (int m = 0; m < kM; ++m) {
      left[m][0] = gpu::to_tf32(a[m][k][0]);
      left[m][1] = gpu::to_tf32(a[m][k][2]);
      left[m][2] = gpu::to_tf32(a[m][k][1]);
      left[m][3] = gpu::to_tf32(a[m][k][3]);
    }
#pragma unroll
    for (int j = 0; j < kD / 16; ++j) {
      const float* const at = base + k * 8 * kPitch<kD> + j * 16;
      const uint2 even = *reinterpret_cast<const uint2*>(at),
                  odd = *reinterpret_cast<const uint2*>(at + kPitch<kD>);
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        gpu::mma_m16n8k8_tf32(acc[m][2 * j], left[m], even.x, odd.x);
        gpu::mma_m16n8k8_tf32(acc[m][2 * j + 1], left[m], even.y, odd.y);
      }
    }
  }
}

/// Writes the result of gemm_ab, row half (m, half) times factor[m][half], to global rows; `row` is the
/// warp's first, `rows` counts from row 0 of `to`.
template <int kD, int kM>
__device__ __forceinline__ void store_columns(const float (&acc)[kM][kD / 8][4], const float (&factor)[kM][2],
                                              int row, float* to, int64_t stride, int rows, int dim) {
  const int lane = int(threadIdx.x) % 32;
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int own = row + m * 16 + half * 8 + lane / 4;
#pragma unroll
      for (int j = 0; j < kD / 16; ++j) {
        const int column = j * 16 + lane % 4 * 4;
        const float f = factor[m][half];
        if (own < rows && column < dim)
          *reinterpret_cast<float4*>(to + own * stride + column) = {
              acc[m][2 * j][2 * half] * f, acc[m][2 * j + 1][2 * half] * f, acc[m][2 * j][2 * half + 1] * f,
              acc[m][2 * j + 1][2 * half + 1] * f};
      }
    }
}

}  // namespace tessera::ops::tf32
