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

  /// Bit k: element k of Philox block `index` lives. The block is philox(seed, offset, index).
  __device__ __forceinline__ uint32_t four(uint64_t offset, uint64_t index) const {
    const Uint4 random =
        keys.block({{uint32_t(index), uint32_t(index >> 32), uint32_t(offset), uint32_t(offset >> 32)}});
    uint32_t keep_bits = 0;
#pragma unroll
    for (int k = 0; k < 4; ++k) keep_bits |= mask.keeps(random.word[k]) ? 1u << k : 0u;
    return keep_bits;
  }

  /// Bit k: the element at row-major place + k lives, k < kCount. Places that are multiples of four, as all
  /// are with kWhole, need kCount / 4 blocks, others one more. `offset`: of the stream.
  template <int kCount, bool kWhole = false>
  __device__ __forceinline__ uint32_t keep_bits(uint64_t offset, int64_t place) const {
    static_assert(kCount % 4 == 0 && kCount <= 24);
    const uint64_t block = uint64_t(place) / 4;
    uint32_t bits = 0;
#pragma unroll
    for (int n = 0; n < kCount / 4; ++n) bits |= four(offset, block + n) << (4 * n);
    const int shift = kWhole ? 0 : int(place % 4);
    if (shift != 0) bits = (bits | four(offset, block + kCount / 4) << kCount) >> shift;
    return bits;
  }
};

}  // namespace tessera::ops
