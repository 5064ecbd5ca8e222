#pragma once

#include <cstdint>

#include "runtime/config.h"

/// Philox4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC 2011,
/// section 3.3): a counter-based generator, so the i-th number of a stream is a pure function of (seed,
/// offset, i), the same on every device, in any order and under any partition of the work.

namespace tessera {

struct Uint4 {
  uint32_t word[4];
};

/// The whole product. On a GPU one instruction; a product of two u64 is compiled with an addition more.
TESSERA_HD uint64_t wide_product(uint32_t a, uint32_t b) {
#if defined(__CUDA_ARCH__)
  uint64_t product;
  asm("mul.wide.u32 %0, %1, %2;" : "=l"(product) : "r"(a), "r"(b));
  return product;
#else
  return uint64_t(a) * b;
#endif
}

/// 128 random bits for block `index` of stream `offset` under `seed`.
TESSERA_HD Uint4 philox(uint64_t seed, uint64_t offset, uint64_t index) {
  uint32_t c0 = uint32_t(index), c1 = uint32_t(index >> 32), c2 = uint32_t(offset),
           c3 = uint32_t(offset >> 32);
  uint32_t k0 = uint32_t(seed), k1 = uint32_t(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = wide_product(0xD2511F53u, c0), p1 = wide_product(0xCD9E8D57u, c2);
    const uint32_t n0 = uint32_t(p1 >> 32) ^ c1 ^ k0, n2 = uint32_t(p0 >> 32) ^ c3 ^ k1;
    c1 = uint32_t(p1), c3 = uint32_t(p0), c0 = n0, c2 = n2;
    k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

/// A 32-bit word to (0, 1]: never 0, so that its logarithm is finite.
TESSERA_HD float uniform_open(uint32_t word) {
  return (float(word >> 8) + 1.0f) * (1.0f / 16777216.0f);
}
/// A 32-bit word to [0, 1).
TESSERA_HD float uniform_half_open(uint32_t word) {
  return float(word >> 8) * (1.0f / 16777216.0f);
}

}  // namespace tessera
