#include "datasets/shuffle.h"

#include "runtime/error.h"
#include "runtime/philox.h"

namespace tessera::datasets {
namespace {

constexpr uint64_t kShuffleDomain = 0x73687566666C6501;  // "shuffle"
constexpr int kRounds = 8;

}  // namespace

Permutation::Permutation(int64_t n, uint64_t seed, uint64_t stream, uint64_t epoch)
    : n_(n), seed_(seed ^ kShuffleDomain), stream_(stream), epoch_(epoch) {
  check(n >= 1 && n < int64_t{1} << 62, "shuffle: ", n, " items; expected 1 to 2^62 - 1");
  while (int64_t{1} << (2 * half_bits_) < n) ++half_bits_;
}

int64_t Permutation::operator()(int64_t i) const {
  check(0 <= i && i < n_, "shuffle: place ", i, " of ", n_, " items");
  const uint64_t mask = (uint64_t{1} << half_bits_) - 1;
  uint64_t value = uint64_t(i);
  do {
    uint64_t left = value >> half_bits_, right = value & mask;
    for (uint64_t round = 0; round < kRounds; ++round) {
      // A half has at most 31 bits, the round lies above it.
      const Uint4 random = philox(seed_ + epoch_, stream_, right | round << 32);
      const uint64_t next = left ^ (random.word[0] & mask);
      left = right;
      right = next;
    }
    value = left << half_bits_ | right;
  } while (value >= uint64_t(n_));
  return int64_t(value);
}

}  // namespace tessera::datasets
