#pragma once

#include <cstdint>
#include <utility>

#include "runtime/config.h"

/// The 90 patterns of a 4 x 4 block with two elements per row and per column.

namespace tessera::ops::weight24 {

constexpr int kPatterns = 90;

/// The columns of a row that pair `i` keeps, as bits: 01, 02, 03, 12, 13, 23.
constexpr uint32_t kPairs[6] = {0b0011, 0b0101, 0b1001, 0b0110, 0b1010, 0b1100};

/// Which pair each row keeps.
struct Pattern {
  int pair[4];
  /// Bit 4 r + c: whether row r keeps column c.
  constexpr uint32_t bits() const {
    uint32_t all = 0;
    for (int row = 0; row < 4; ++row) all |= kPairs[pair[row]] << 4 * row;
    return all;
  }
};

/// Pattern `number`, in the order of its rows' pairs, the first row first.
constexpr Pattern pattern_of(int number) {
  for (int i = 0; i < 6 * 6 * 6 * 6; ++i) {
    const Pattern one{{i / 216, i / 36 % 6, i / 6 % 6, i % 6}};
    bool keeps_two = true;
    for (int column = 0; column < 4; ++column) {
      int kept = 0;
      for (int row = 0; row < 4; ++row) kept += int(kPairs[one.pair[row]] >> column & 1);
      keeps_two = keeps_two && kept == 2;
    }
    if (keeps_two && number-- == 0) return one;
  }
  return {{-1, -1, -1, -1}};
}
static_assert(pattern_of(0).bits() == 0b1100'1100'0011'0011 && pattern_of(kPatterns - 1).pair[0] == 5 &&
              pattern_of(kPatterns).pair[0] == -1);

/// The best so far.
struct Choice {
  double sum = -1;
  uint32_t bits = 0;
};

template <int kNumber>
TESSERA_HD void consider(Choice& best, const double (&pairs)[4][6]) {
  constexpr Pattern kPattern = pattern_of(kNumber);
  constexpr uint32_t kBits = kPattern.bits();
  constexpr int k0 = kPattern.pair[0], k1 = kPattern.pair[1], k2 = kPattern.pair[2], k3 = kPattern.pair[3];
  const double sum = (pairs[0][k0] + pairs[1][k1]) + (pairs[2][k2] + pairs[3][k3]);
  if (sum > best.sum) best.sum = sum, best.bits = kBits;
}

template <int... kNumbers>
TESSERA_HD uint32_t best_of(const double (&pairs)[4][6], std::integer_sequence<int, kNumbers...>) {
  Choice best;
  (consider<kNumbers>(best, pairs), ...);
  return best.bits;
}

/// The pattern, as bits, of the largest sum of magnitudes [row][column], which are not NaN.
TESSERA_HD uint32_t best_pattern(const double (&magnitude)[4][4]) {
  double pairs[4][6];
  for (int row = 0; row < 4; ++row) {
    const double(&m)[4] = magnitude[row];
    pairs[row][0] = m[0] + m[1], pairs[row][1] = m[0] + m[2], pairs[row][2] = m[0] + m[3];
    pairs[row][3] = m[1] + m[2], pairs[row][4] = m[1] + m[3], pairs[row][5] = m[2] + m[3];
  }
  return best_of(pairs, std::make_integer_sequence<int, kPatterns>());
}

/// |x|, NaN as infinity.
TESSERA_HD double magnitude_of(double x) {
  const double size = x < 0 ? -x : x;
  return size == size ? size : double(__builtin_huge_val());
}

}  // namespace tessera::ops::weight24
