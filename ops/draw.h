#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>

namespace tessera::ops {

/// Random sizes of a problem, for OpSpec::sweep: a function of (seed, number) alone, so that a list of
/// problems can be drawn again anywhere.
class Draw {
 public:
  Draw(uint64_t seed, uint64_t number) : seed_(seed), number_(number) {}

  /// A size from `low` to `high`, log-uniform: small ones are as likely as large ones. Two in five stay as
  /// they fell; the others become the nearest size in that range that is odd, prime, a multiple of 8, or next
  /// to or at a power of two (the edges of tiles).
  int64_t size(int64_t low, int64_t high);
  /// True in that share of draws.
  bool chance(double share) { return uniform() < share; }
  /// A number from 0 to n - 1, all equally likely.
  int64_t below(int64_t n) { return int64_t(uniform() * double(n)); }
  /// One of them, all equally likely.
  int64_t pick(std::initializer_list<int64_t> sizes) {
    return sizes.begin()[std::size_t(uniform() * double(sizes.size()))];
  }

 private:
  double uniform();  // [0, 1)

  uint64_t seed_, number_, drawn_ = 0;
};

}  // namespace tessera::ops
