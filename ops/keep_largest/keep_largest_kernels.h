#pragma once

#include <cstdint>

#include "ops/keep_largest/keep_largest.h"
#include "runtime/config.h"

namespace tessera::ops {

/// A score as an unsigned number of the same order: -0 as 0, every NaN above +inf.
TESSERA_HD uint32_t score_key(uint32_t bits) {
  constexpr uint32_t kSign = 0x80000000u, kInfinity = 0x7F800000u;
  if ((bits & ~kSign) > kInfinity) return ~uint32_t{0};
  if (bits == kSign) bits = 0;
  return bits & kSign ? ~bits : bits | kSign;
}

/// keep u8 and scores f32, both [rows, columns] and packed.
void keep_largest_cpu(const Tensor& keep, const Tensor& scores, const KeepLargest& how);
void keep_largest_cuda(const Tensor& keep, const Tensor& scores, const KeepLargest& how);

}  // namespace tessera::ops
