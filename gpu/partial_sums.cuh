#pragma once

#include <type_traits>

#include "gpu/dependent_launch.cuh"
#include "gpu/reduce.cuh"
#include "tensor/tensor.h"

/// The second half of a sum over rows: blocks have written partial sums, one row each, which are added here
/// in a fixed order.

namespace tessera::gpu {

/// Partial sums [rows, width] and where their sum [width] goes, rounded to Out.
template <class Out = float>
struct PartialSums {
  const float* from;
  Out* to;
};

inline constexpr int kFewRows = 8;

/// Columns that a block of add_columns sums.
__host__ __device__ inline int64_t columns_per_block(int64_t rows) {
  return rows <= kFewRows ? kWarp * kWarp : kWarp;
}

/// Sums the columns of block `tile` with 32 x 32 threads: thread y of a column adds every 32nd row, then a
/// warp reduction adds the 32 sums of a column. Few rows leave 24 and more of 32 threads nothing to add: then
/// a column is one thread's, which adds them in the reduction's order.
template <class Out>
__device__ __forceinline__ void add_columns(const PartialSums<Out>& which, unsigned tile, int64_t rows,
                                            int64_t width, int64_t stride) {
  if (rows <= kFewRows) {
    const int64_t own = tile * int64_t(kWarp * kWarp) + threadIdx.y * kWarp + threadIdx.x;
    if (own >= width) return;
    float of[kFewRows];
#pragma unroll
    for (int row = 0; row < kFewRows; ++row) of[row] = row < rows ? which.from[row * stride + own] : 0.0f;
#pragma unroll
    for (int half = kFewRows / 2; half > 0; half /= 2)
#pragma unroll
      for (int row = 0; row < half; ++row) of[row] += of[row + half];
    which.to[own] = Out(of[0]);
    return;
  }
  __shared__ float sums[kWarp][kWarp + 1];
  const int64_t column = tile * int64_t(kWarp) + threadIdx.x;
  float sum = 0;
  if (column < width)
#pragma unroll 8
    for (int64_t row = threadIdx.y; row < rows; row += kWarp) sum += which.from[row * stride + column];
  sums[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  sum = warp_reduce<Sum>(sums[threadIdx.x][threadIdx.y]);
  const int64_t own = tile * int64_t(kWarp) + threadIdx.y;
  if (threadIdx.x == 0 && own < width) which.to[own] = Out(sum);
}

/// For up to two sums of one shape; blocks with blockIdx.y = 1 compute the second.
template <int kSums, class Out>
__global__ void __launch_bounds__(kWarp* kWarp)
    add_partial_sums_kernel(PartialSums<Out> first, PartialSums<Out> second, int64_t rows, int64_t width,
                            int64_t stride) {
  wait_and_launch_dependents();
  add_columns(kSums == 1 || blockIdx.y == 0 ? first : second, blockIdx.x, rows, width, stride);
}

/// Launches the kernel for those of the two whose `to` is not null. Rows are `stride` apart; 0: packed rows.
template <class Out>
void add_partial_sums(Device device, PartialSums<Out> first, std::type_identity_t<PartialSums<Out>> second,
                      int64_t rows, int64_t width, int64_t stride = 0) {
  if (stride == 0) stride = width;
  if (!first.to) std::swap(first, second);
  if (!first.to) return;
  const unsigned blocks = unsigned(ceil_div(width, columns_per_block(rows)));
  const dim3 threads(kWarp, kWarp);
  if (second.to) {
    launch_dependent(device, {dim3(blocks, 2), threads}, add_partial_sums_kernel<2, Out>, first, second, rows,
                     width, stride);
  } else {
    launch_dependent(device, {dim3(blocks), threads}, add_partial_sums_kernel<1, Out>, first, second, rows,
                     width, stride);
  }
}

}  // namespace tessera::gpu
