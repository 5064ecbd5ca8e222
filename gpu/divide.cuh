#pragma once

#include <cstdint>

namespace tessera::gpu {

/// Division of 32-bit numbers below 2^31 by a number fixed on the host: a multiplication and a shift
/// (Granlund, Montgomery: "Division by invariant integers using multiplication", PLDI 1994, figure 4.1).
struct Divider {
  uint32_t divisor = 1, magic = 1, shift = 0;

  Divider() = default;
  /// 1 <= divisor < 2^31.
  explicit Divider(uint32_t divisor) : divisor(divisor) {
    while ((uint64_t(1) << shift) < divisor) ++shift;
    magic = uint32_t(((uint64_t(1) << 32) * ((uint64_t(1) << shift) - divisor)) / divisor + 1);
  }
  __device__ __forceinline__ uint32_t divide(uint32_t n) const { return (__umulhi(n, magic) + n) >> shift; }
};

}  // namespace tessera::gpu
