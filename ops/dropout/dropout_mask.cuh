#pragma once

#include "ops/dropout/dropout_kernels.h"
#include "ops/dropout/philox_keys.h"

/// A dropout mask in kernels: a quarter of a Philox block per element, 10 rounds of two wide products and two
/// exclusive ors of three (the rounds' keys are parameters), 10 integer instructions per element and some 3
/// to compare. An H100 issues 64 of them per clock and SM, enough for 1.1 10^12 elements per second.

namespace tessera::ops {

/// As a kernel takes it.
struct DropoutDraw {
  DropoutMask mask;
  PhiloxKeys<10> keys;
  float scale = 1;  // the mask's: a kernel would convert it with a slow instruction

  DropoutDraw() = default;
  explicit DropoutDraw(const DropoutMask& mask)
      : mask(mask), keys(mask.stream.seed), scale(float(mask.scale)) {}

  /// Of the stream: from memory in a captured graph, so once a thread is enough.
  __device__ __forceinline__ uint64_t offset() const { return mask.stream.offset(); }

  /// Bit k: element k of the Philox blocks from `first` on lives. Block b is philox(seed, offset, b).
  template <int kBlocks>
  __device__ __forceinline__ uint32_t blocks(uint64_t offset, uint64_t first) const {
    static_assert(kBlocks <= 8);
    uint32_t keep_bits = 0;
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
      const uint64_t index = first + n;
      const Uint4 random =
          keys.block({{uint32_t(index), uint32_t(index >> 32), uint32_t(offset), uint32_t(offset >> 32)}});
#pragma unroll
      for (int k = 0; k < 4; ++k) keep_bits |= mask.keeps(random.word[k]) ? 1u << (4 * n + k) : 0u;
    }
    return keep_bits;
  }

  /// Bit k: the element at row-major place + k lives, k < kCount. Places that are multiples of four need
  /// kCount / 4 blocks, others one more. `offset`: of the stream.
  template <int kCount>
  __device__ __forceinline__ uint32_t keep_bits(uint64_t offset, int64_t place) const {
    static_assert(kCount % 4 == 0 && kCount <= 24);
    const uint64_t block = uint64_t(place) / 4;
    const uint32_t bits = blocks<kCount / 4>(offset, block);
    const int shift = int(place % 4);
    return shift == 0 ? bits : (bits | blocks<1>(offset, block + kCount / 4) << kCount) >> shift;
  }
};

}  // namespace tessera::ops
