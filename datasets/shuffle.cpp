#include "datasets/shuffle.h"

#include "runtime/error.h"
#include "runtime/philox.h"

namespace tessera::datasets {
namespace {

constexpr uint64_t kShuffleDomain = 0x73687566666C6501;  // "shuffle"
constexpr int kRounds = 8;

}  // namespace

Permutation::Permutation(int64_t n, uint64_t seed, uint64_t stream, uint64_t epoch, int64_t version)
    : n_(n),
      key_((seed ^ kShuffleDomain) + (version == 1 ? epoch : 0)),
      stream_(stream),
      epoch_(version == 1 ? 0 : epoch) {
  check(n >= 1 && n < int64_t{1} << 62, "shuffle: ", n, " items; expected 1 to 2^62 - 1");
  check(epoch_ < uint64_t{1} << 29, "shuffle: epoch ", epoch_, "; expected less than 2^29");
  while (int64_t{1} << (2 * half_bits_) < n) ++half_bits_;
}

int64_t Permutation::operator()(int64_t i) const {
  check(0 <= i && i < n_, "shuffle: place ", i, " of ", n_, " items");
  const uint64_t mask = (uint64_t{1} << half_bits_) - 1;
  uint64_t value = uint64_t(i);
  do {
    uint64_t left = value >> half_bits_, right = value & mask;
    for (uint64_t round = 0; round < kRounds; ++round) {
      // A half has at most 31 bits; above it lie the round, in three bits, and the epoch.
      const Uint4 random = philox(key_, stream_, right | round << 32 | epoch_ << 35);
      const uint64_t next = left ^ (random.word[0] & mask);
      left = right;
      right = next;
    }
    value = left << half_bits_ | right;
  } while (value >= uint64_t(n_));
  return int64_t(value);
}

}  // namespace tessera::datasets
