#pragma once

#include <cstdint>

namespace tessera::datasets {

/// Version of the function (seed, stream, epoch) -> order. Runs note it and go on with the order that they
/// began with. 1 had seed + epoch as its key, so that runs of neighbouring seeds met the same orders, an
/// epoch apart.
inline constexpr int64_t kDataOrder = 2;

/// A pseudo-random order of n items, addressed item by item and without memory: a Feistel network of eight
/// Philox rounds over the next power of four, walked until it lands inside (Black, Rogaway: "Ciphers with
/// arbitrary finite domains", CT-RSA 2002, section 3). A pure function of (seed, stream, epoch).
class Permutation {
 public:
  /// Throws unless 1 <= n < 2^62 and epoch < 2^29.
  Permutation(int64_t n, uint64_t seed, uint64_t stream, uint64_t epoch, int64_t version = kDataOrder);
  /// The item at place i. Throws unless 0 <= i < n.
  int64_t operator()(int64_t i) const;

 private:
  int64_t n_;
  int half_bits_ = 1;
  uint64_t key_, stream_, epoch_;
};

}  // namespace tessera::datasets
