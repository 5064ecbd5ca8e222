#pragma once

#include "gpu/mma.cuh"
#include "ops/sparse24/compress24_tile.cuh"
#include "ops/sparse24/packed24_math.h"

/// The selection of packed24_math.h in kernels: a thread's groups of a tile in shared memory, two at a time
/// (rows 16 w + g and + 8 of A), and the exchanges among the lanes of a quad.

namespace tessera::ops {
namespace {

/// The nibbles of a quad transposed: a thread's own <-> the word of metadata that it stores or loads.
__device__ __forceinline__ uint32_t transposed_nibbles(uint32_t word) {
  const int c = int(threadIdx.x) % 4;
#pragma unroll
  for (int exchange = 0; exchange < 2; ++exchange)
    word = exchanged_nibbles(word, __shfl_xor_sync(0xFFFFFFFFu, word, 1 << exchange), c, exchange);
  return word;
}

/// Groups number 2 step + half of this thread's two rows.
struct RowPair {
  GroupWords low, high;

  __device__ __forceinline__ TwoGroups groups() const {
    return TwoGroups::of(low.x01, low.x23, high.x01, high.x23);
  }
};
/// Position of a group along features: row 16 w + g, or + 8 with `down`.
template <class T>
__device__ __forceinline__ uint2* feature_group(TileOfX<T>& tile, int number, int down) {
  const int thread = int(threadIdx.x), row = thread / 32 * 16 + thread % 32 / 4 + down * 8;
  return reinterpret_cast<uint2*>(tile.chunk(row, number * 4 + thread % 4));
}
template <Along24 kAlong, class T>
__device__ __forceinline__ RowPair read_groups(TileOfX<T>& tile, int number) {
  if constexpr (kAlong == Along24::features) {
    const uint2 low = *feature_group(tile, number, 0), high = *feature_group(tile, number, 1);
    return {{low.x, low.y}, {high.x, high.y}};
  } else {
    const int lane = int(threadIdx.x) % 32, feature = int(threadIdx.x) / 32 * 16 + tokens_column(lane);
    uint32_t words[4];
    gpu::ldmatrix_x4_trans(words, gpu::shared_address(tile.chunk(tokens_row(lane, number), feature / 4)));
    return {{words[0], words[1]}, {words[2], words[3]}};
  }
}

/// Where this thread's values of a step lie: those of both rows, half 0, then half 1.
template <class T>
__device__ __forceinline__ uint4* step_values(T* values, int64_t tile, int step) {
  return reinterpret_cast<uint4*>(values + tile * kTileValues + step * kStepValues + int(threadIdx.x) * 8);
}

}  // namespace
}  // namespace tessera::ops
