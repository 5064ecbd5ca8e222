#pragma once

#include "runtime/philox.h"

namespace tessera::ops {

/// Philox4x32 (runtime/philox.h) for kernels that draw much under one seed: the keys of all rounds are made
/// on the host, so that as kernel parameters they cost no instructions. Of kRounds 10 it gives the same
/// numbers as `philox`; 7 are the fewest that pass BigCrush (Salmon et al., SC 2011, section 5.1).
template <int kRounds>
struct PhiloxKeys {
  uint32_t words[2 * kRounds] = {};

  PhiloxKeys() = default;
  explicit PhiloxKeys(uint64_t seed) {
    for (uint32_t n = 0; n < kRounds; ++n) {
      words[2 * n] = uint32_t(seed) + n * 0x9E3779B9u;
      words[2 * n + 1] = uint32_t(seed >> 32) + n * 0xBB67AE85u;
    }
  }
  TESSERA_HD Uint4 block(Uint4 counter) const { return rounds<0, kRounds>(counter); }
  /// Only rounds kFirst ... kEnd - 1.
  template <int kFirst, int kEnd>
  TESSERA_HD Uint4 rounds(Uint4 counter) const {
    uint32_t c0 = counter.word[0], c1 = counter.word[1], c2 = counter.word[2], c3 = counter.word[3];
    for (int n = kFirst; n < kEnd; ++n) {
      const uint64_t p0 = uint64_t(0xD2511F53u) * c0, p1 = uint64_t(0xCD9E8D57u) * c2;
      c0 = uint32_t(p1 >> 32) ^ c1 ^ words[2 * n];
      c2 = uint32_t(p0 >> 32) ^ c3 ^ words[2 * n + 1];
      c1 = uint32_t(p1);
      c3 = uint32_t(p0);
    }
    return {{c0, c1, c2, c3}};
  }
};

}  // namespace tessera::ops
