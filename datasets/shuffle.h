#pragma once

#include <cstdint>

namespace tessera::datasets {

/// A pseudo-random order of n items, addressed item by item and without memory: a Feistel network of eight
/// Philox rounds over the next power of four, walked until it lands inside (Black, Rogaway: "Ciphers with
/// arbitrary finite domains", CT-RSA 2002, section 3). A pure function of (seed, stream, epoch).
class Permutation {
 public:
  /// Throws unless 1 <= n < 2^62.
  Permutation(int64_t n, uint64_t seed, uint64_t stream, uint64_t epoch);
  /// The item at place i. Throws unless 0 <= i < n.
  int64_t operator()(int64_t i) const;

 private:
  int64_t n_;
  int half_bits_ = 1;
  uint64_t seed_, stream_, epoch_;
};

}  // namespace tessera::datasets
