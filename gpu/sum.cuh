#pragma once

#include "gpu/launch.cuh"

namespace tessera::gpu {

/// The sum over a block of up to 1024 threads, whose number is a multiple of 32, in double and in a fixed
/// order; thread 0 gets it. One call a kernel.
__device__ __forceinline__ double block_sum(double value) {
  __shared__ double sums[kWarp];
  const int lane = int(threadIdx.x) % kWarp, warp = int(threadIdx.x) / kWarp, warps = int(blockDim.x) / kWarp;
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2) value += __shfl_down_sync(0xFFFFFFFFu, value, step);
  if (lane == 0) sums[warp] = value;
  __syncthreads();
  if (warp != 0) return value;
  value = lane < warps ? sums[lane] : 0.0;
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2) value += __shfl_down_sync(0xFFFFFFFFu, value, step);
  return value;
}

}  // namespace tessera::gpu
