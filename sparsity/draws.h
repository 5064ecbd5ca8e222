#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "runtime/philox.h"

/// Random numbers of an analysis. A stream is named by its seed and by numbers that say what it is for, so
/// that what one figure draws changes no other, in any order and on any number of threads.

namespace tessera::sparsity {

/// What a stream is for.
enum class DrawFor : uint64_t { pool = 1, reference, clusters, cross_pairs, null_model, bootstrap, map };

class Draws {
 public:
  Draws(uint64_t seed, DrawFor purpose, uint64_t number = 0)
      : seed_(seed ^ 0x9A77'5EED'0000'0000u), stream_(uint64_t(purpose) << 48 ^ number) {}

  uint32_t word() {
    if (at_ == 4) block_ = philox(seed_, stream_, index_++), at_ = 0;
    return block_.word[at_++];
  }
  /// In [0, 1), 53 bits.
  double uniform() {
    const uint64_t high = word();
    return double((high << 32 | word()) >> 11) * 0x1p-53;
  }
  /// In [0, n), without bias; 1 <= n <= 2^32.
  int64_t below(int64_t n) {
    const uint64_t count = uint64_t(n), most = (uint64_t{1} << 32) / count * count;
    uint64_t drawn = word();
    while (drawn >= most) drawn = word();
    return int64_t(drawn % count);
  }
  /// `count` of the numbers 0 ... n - 1, in random order.
  std::vector<int64_t> choose(int64_t n, int64_t count) {
    std::vector<int64_t> all(static_cast<size_t>(n));
    for (int64_t i = 0; i < n; ++i) all[size_t(i)] = i;
    for (int64_t i = 0; i < count; ++i) std::swap(all[size_t(i)], all[size_t(i + below(n - i))]);
    all.resize(size_t(count));
    return all;
  }

 private:
  uint64_t seed_, stream_, index_ = 0;
  Uint4 block_ = {};
  int at_ = 4;
};

}  // namespace tessera::sparsity
