#pragma once

#include <algorithm>

#include "gpu/launch.cuh"

/// Grids of no more blocks than the GPU holds at once, which loop over the work and end with one result.

namespace tessera::gpu {

/// How many blocks of `threads` threads and `shared_bytes` of dynamic shared memory the whole GPU holds at
/// once, but no more than `wanted` and no fewer than 1.
template <class... Params>
unsigned resident_blocks(Device device, void (*kernel)(Params...), int threads, size_t shared_bytes,
                         int64_t wanted) {
  device.activate();
  const auto* const function = reinterpret_cast<const void*>(kernel);
  if (shared_bytes > 32 * 1024) allow_shared_bytes(function, device.index(), shared_bytes);
  int each = 0;
  check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&each, function, threads, shared_bytes));
  const int64_t most = int64_t(std::max(each, 1)) * device.multiprocessors();
  return unsigned(std::clamp<int64_t>(wanted, 1, most));
}

/// Who finishes a grid's work: each block writes its part to memory and calls this with the same counter; all
/// threads of the block that arrives last get true, and see what every block wrote. That block adds the parts
/// up in their own order, so the sum does not depend on who was last. The counter starts at 0 and is 0 again
/// afterwards: one of Device::counters. Contains two barriers.
__device__ __forceinline__ bool last_block(unsigned* arrived) {
  __shared__ bool last;
  __threadfence();  // what this thread wrote, before the block counts as arrived
  __syncthreads();
  if (threadIdx.x == 0) last = atomicInc(arrived, gridDim.x - 1) == gridDim.x - 1;
  __syncthreads();
  if (last) __threadfence();  // the others' parts, after their arrival
  return last;
}

}  // namespace tessera::gpu
