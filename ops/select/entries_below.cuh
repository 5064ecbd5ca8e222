#pragma once

#include "gpu/launch.cuh"

namespace tessera::ops {

/// How many of the ascending `indices` are below `row`; all lanes of a warp call it and get it. 32 probes at
/// a time: three rounds for 32,768 entries.
__device__ __forceinline__ int64_t entries_below(const int32_t* indices, int64_t count, int64_t row) {
  const int lane = int(threadIdx.x) % gpu::kWarp;
  int64_t low = 0, high = count;
  while (low < high) {
    const int64_t step = (high - low + gpu::kWarp - 1) / gpu::kWarp, at = low + lane * step;
    const int below = __popc(__ballot_sync(0xFFFFFFFFu, at < high && indices[at] < row));
    if (below == 0) return low;
    high = min(high, low + below * step);
    low += (below - 1) * step + 1;
  }
  return low;
}

}  // namespace tessera::ops
