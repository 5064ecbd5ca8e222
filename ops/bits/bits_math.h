#pragma once

#include <bit>
#include <cstdint>

#include "ops/bits/bits.h"
#include "runtime/config.h"

/// Arithmetic that the CPU and a GPU share. Included by bits_cpu.cpp and the kernels.

namespace tessera::ops {

/// The 4 bytes that stand in the result for a pair of rows with `a` and `b` bits, `both` of them common: an
/// i32, or an f32 of BitMeasure::jaccard.
TESSERA_HD uint32_t pair_value(BitMeasure measure, uint32_t a, uint32_t b, uint32_t both) {
  if (measure == BitMeasure::overlap) return both;
  if (measure == BitMeasure::hamming) return a + b - 2 * both;
  const uint32_t either = a + b - both;
  return std::bit_cast<uint32_t>(either == 0 ? 1.0f : float(both) / float(either));
}

/// Distance and index of a row as one number: smaller is nearer, and earlier of equal distances.
TESSERA_HD uint64_t nearness(uint32_t distance, uint32_t index) {
  return uint64_t(distance) << 32 | index;
}

}  // namespace tessera::ops
