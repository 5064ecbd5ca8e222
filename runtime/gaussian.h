#pragma once

#include <cmath>
#include <cstdint>
#include <numbers>

#include "runtime/philox.h"

/// Standard normal numbers on the host, in f64 (Box, Muller, Ann. Math. Stat. 29, 1958). Up to 5.8 in size,
/// as 24 bits of a word are used.

namespace tessera {

/// The number of a pair of words.
inline double gaussian_of(uint32_t radius, uint32_t angle) {
  return std::sqrt(-2 * std::log(double(uniform_open(radius)))) *
         std::cos(2 * std::numbers::pi * double(uniform_half_open(angle)));
}

/// The i-th number of a stream.
inline double gaussian(uint64_t seed, uint64_t offset, uint64_t i) {
  const Uint4 random = philox(seed, offset, i / 2);
  const uint64_t pair = i % 2 * 2;
  return gaussian_of(random.word[pair], random.word[pair + 1]);
}

}  // namespace tessera
