#pragma once

#include <cstdint>

#include <cuda_runtime.h>

#include "runtime/error.h"

namespace tessera::gpu {

/// Limits of a grid: 2^31 - 1 blocks along x, 65,535 along y (CUDA programming guide, "Compute
/// Capabilities").
inline constexpr int64_t kMostBlocks = 0x7FFFFFFF, kMostBlocksOfY = 65535;

/// A grid of x times y blocks. Throws if there are too many, instead of launching the number modulo 2^32.
inline dim3 grid_of(int64_t x, int64_t y = 1) {
  check(0 <= x && x <= kMostBlocks && 0 <= y && y <= kMostBlocksOfY, "a launch of ", x, " x ", y,
        " blocks; a GPU takes at most ", kMostBlocks, " x ", kMostBlocksOfY,
        " (split the rows over several calls)");
  return dim3(unsigned(x), unsigned(y));
}

}  // namespace tessera::gpu
