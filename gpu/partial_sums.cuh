#pragma once

#include "gpu/chain.cuh"
#include "gpu/reduce.cuh"
#include "tensor/tensor.h"

/// The second half of a sum over rows: blocks have written partial sums, one row each, which are added here
/// in a fixed order.

namespace tessera::gpu {

/// Partial sums [rows, width], packed, and where their sum [width] goes.
struct PartialSums {
  const float* from;
  float* to;
};

/// Of up to two sums of one shape, the second in blocks of y = 1. Thread y of a column adds every 32nd row;
/// the 32 threads' sums are then added by the butterfly of a warp.
template <int kSums>
__global__ void __launch_bounds__(kWarp* kWarp)
    add_partial_sums_kernel(PartialSums first, PartialSums second, int64_t rows, int64_t width) {
  __shared__ float sums[kWarp][kWarp + 1];
  take_turn();
  const PartialSums which = kSums == 1 || blockIdx.y == 0 ? first : second;
  const int64_t column = blockIdx.x * int64_t(kWarp) + threadIdx.x;
  float sum = 0;
  if (column < width)
#pragma unroll 8
    for (int64_t row = threadIdx.y; row < rows; row += kWarp) sum += which.from[row * width + column];
  sums[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  sum = warp_reduce<Sum>(sums[threadIdx.x][threadIdx.y]);
  const int64_t own = blockIdx.x * int64_t(kWarp) + threadIdx.y;
  if (threadIdx.x == 0 && own < width) which.to[own] = sum;
}

/// Launches it for those of the two whose `to` is not null.
inline void add_partial_sums(Device device, PartialSums first, PartialSums second, int64_t rows,
                             int64_t width) {
  if (!first.to) std::swap(first, second);
  if (!first.to) return;
  const unsigned blocks = unsigned(ceil_div(width, kWarp));
  const dim3 threads(kWarp, kWarp);
  if (second.to) {
    launch_chained(device, {dim3(blocks, 2), threads}, add_partial_sums_kernel<2>, first, second, rows,
                   width);
  } else {
    launch_chained(device, {dim3(blocks), threads}, add_partial_sums_kernel<1>, first, second, rows, width);
  }
}

}  // namespace tessera::gpu
