#pragma once

#include "gpu/launch.cuh"

namespace tessera::gpu {

struct Sum {
  __device__ float operator()(float a, float b) const { return a + b; }
  static constexpr float kIdentity = 0.0f;
};
struct Max {
  // Keeps a NaN, as the CPU reference does. PTX ISA 9.7.3.11 (max).
  __device__ float operator()(float a, float b) const {
    float larger;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(a), "f"(b));
    return larger;
  }
  static constexpr float kIdentity = -__builtin_huge_valf();
};

/// Combines the values of all 32 lanes (of each group of `kLanes`); every lane gets the result. A fixed
/// butterfly, so the result is the same in every run. `lanes`: those that call it together.
template <class Op, int kLanes = kWarp>
__device__ __forceinline__ float warp_reduce(float value, Op op = {}, uint32_t lanes = 0xFFFFFFFFu) {
#pragma unroll
  for (int step = kLanes / 2; step > 0; step /= 2) value = op(value, __shfl_xor_sync(lanes, value, step));
  return value;
}

/// The lanes of the calling thread's group of `kLanes`.
template <int kLanes>
__device__ __forceinline__ uint32_t group_lanes() {
  if constexpr (kLanes == kWarp)
    return 0xFFFFFFFFu;
  else
    return ((1u << kLanes) - 1) << (threadIdx.x % kWarp / kLanes * kLanes);
}

/// Combines the values of all threads of a block of up to 1024; every thread gets the result. Contains two
/// barriers; `scratch` is 32 floats of shared memory that may be reused right after.
template <class Op>
__device__ __forceinline__ float block_reduce(float value, float* scratch, Op op = {}) {
  const int lane = int(threadIdx.x) % kWarp, warp = int(threadIdx.x) / kWarp,
            warps = int(blockDim.x + 31) / kWarp;
  value = warp_reduce(value, op);
  __syncthreads();  // threads may still read the last result
  if (lane == 0) scratch[warp] = value;
  __syncthreads();
  value = lane < warps ? scratch[lane] : Op::kIdentity;
  return warp_reduce(value, op);
}

}  // namespace tessera::gpu
