#pragma once

#include "ops/select/select_math.h"

/// The arithmetic of variant "cluster" (select_cluster.cuh), which tests on the CPU run as well: whose rows
/// are whose, and one digit of the search for the bar.

namespace tessera::ops {

/// What the search for the bar knows after some digits, from the top.
struct RadixSearch {
  uint32_t bar, above;  // the digits so far, then zeros; values above all that agree with the digits
  uint64_t below, at;   // sums of the values below those that agree, and of those that agree
  uint32_t count;       // of those that agree
};

/// Whether `digit` (of 0 ... last) is the bar's next one, at bit `shift`: the largest at which enough rows
/// reach the bar. Then `to` is the search with it. `higher`: counts and sums of the values that agree with
/// the bar so far and have a higher digit; `own`: of those with this one; `sum`: of all that agree.
TESSERA_HD bool take_digit(RadixSearch& to, const RadixSearch& from, bool weighted, uint32_t k, int shift,
                           uint32_t digit, uint32_t last, const RowTerm& higher, const RowTerm& own,
                           uint64_t sum) {
  const RowTerm reached{higher.chosen + own.chosen, higher.drawable + own.drawable};
  const auto holds = [&](uint32_t some, const RowTerm& above) {
    return reaches(weighted, from.bar | some << shift, k, above.chosen, from.below + sum - above.drawable);
  };
  if (!holds(digit, reached) || (digit != last && holds(digit + 1, higher))) return false;
  to = {from.bar | digit << shift, higher.chosen, from.below + sum - reached.drawable, own.drawable,
        own.chosen};
  return true;
}

/// The cut that a search of all digits has found, of k of `rows` rows.
TESSERA_HD Cut cut_of_search(bool weighted, const RadixSearch& search, uint32_t k, uint32_t rows,
                             uint64_t seed, uint64_t stream) {
  const uint32_t highest = highest_bar(weighted), bar = search.bar < highest ? search.bar : highest;
  const uint32_t above = search.above + (bar < search.bar ? search.count : 0);
  return cut_at(weighted, bar, k, above, search.below + search.at, rows, seed, weighted ? stream : 0);
}

/// The blocks of a cluster, each with neighbouring rows that are a multiple of four (a load, a Philox block).
struct ClusterChunks {
  static constexpr int64_t kMostRows = 131072;  // 16,384 values of a block are 64 KiB of shared memory
  int blocks = 1;                               // 1, 2, 4 or 8
  uint32_t rows = 0;                            // of a block

  /// A block for every 4,096 rows: four for each of its threads.
  explicit ClusterChunks(int64_t all) {
    while (blocks < 8 && all > int64_t(blocks) * 4096) blocks *= 2;
    rows = uint32_t((all + blocks * 4 - 1) / (blocks * 4) * 4);
  }
};

/// Digits of 8 bits, and sums of weights as two sums of 16 bits each: shared memory adds 32 bits, and of
/// 65,536 values such a sum does not overflow.
inline constexpr int kDigitBits = 8, kDigits = 1 << kDigitBits, kDigitPasses = 32 / kDigitBits;
TESSERA_HD int digit_shift(int pass) {
  return 32 - kDigitBits * (pass + 1);
}
/// The bits that earlier passes have decided.
TESSERA_HD uint32_t digits_known(int pass) {
  return pass == 0 ? 0 : ~uint32_t{0} << digit_shift(pass - 1);
}
TESSERA_HD uint64_t joined_sum(uint32_t low, uint32_t high) {
  return low + (uint64_t(high) << 16);
}

}  // namespace tessera::ops
