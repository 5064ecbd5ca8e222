#pragma once

#include <cstdint>
#include <cstring>

#include "ops/generation/sample_math.h"
#include "runtime/rng.h"

/// The arithmetic of selections, the same bits on the CPU and on a GPU: integers, and single IEEE operations.
/// Included by select_cpu.cpp and the kernels.
///
/// Every row has a value of 32 bits (the rank of its norm, a random key, or its weight), and every selection
/// is a Cut of these values: rows above the bar are chosen, and `picks` of the rows at it (top_norm, random)
/// or up to it (importance).

namespace tessera::ops {

/// A share in units of 2^-32, rounded up: rows * units then is not below the exact number of rows where that
/// is whole.
inline uint64_t units_of_share(double share) {
  return uint64_t(share * 4294967296.0) + 1;
}
/// For up to 2^31 rows the product stays below 2^64.
TESSERA_HD uint32_t rows_of_units(uint32_t rows, uint64_t units) {
  const auto share = uint32_t(uint64_t(rows) * units >> 32);
  return share > 0 || rows == 0 ? share : 1;
}

/// Order of the norms: larger for a larger one, equal for equal ones; NaN is the largest.
TESSERA_HD uint32_t norm_rank(float norm) {
  return norm != norm ? 0xFFFFFFFFu : logit_rank(norm);
}

/// The weight of rows that importance takes for certain; no finite norm has it.
inline constexpr uint32_t kCertain = 0xFFFFFFFFu;

TESSERA_HD uint32_t bits_of(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}
/// The exponent field of a positive finite norm, 1 for subnormal ones; 0 for every other.
TESSERA_HD uint32_t norm_exponent(float norm) {
  const uint32_t bits = bits_of(norm);
  if (bits == 0 || bits >= 0x7F800000u) return 0;  // 0, negative, infinite, NaN
  return bits >> 23 ? bits >> 23 : 1;
}
/// The norm as an integer: its 24 bits, the first of them at bit 31 for a norm of the largest exponent.
TESSERA_HD uint32_t norm_weight(float norm, uint32_t largest_exponent) {
  if (norm != norm || bits_of(norm) == 0x7F800000u) return kCertain;
  const uint32_t exponent = norm_exponent(norm);
  if (exponent == 0) return 0;
  const uint32_t bits = bits_of(norm), mantissa = (bits & 0x7FFFFFu) | (bits >> 23 ? 0x800000u : 0u);
  const uint32_t shift = largest_exponent - exponent;
  const uint32_t weight = shift < 32 ? (mantissa << 8) >> shift : 0;
  return weight > 0 ? weight : 1;
}

/// Word i of the stream, four to a block.
struct RandomKeys {
  uint64_t seed, offset;
  TESSERA_HD Uint4 of_four(uint64_t quad) const { return philox(seed, offset, quad); }
};

/// What one row adds to the sums over the rows before another.
struct RowTerm {
  uint32_t chosen = 0;    // 1: above the bar
  uint64_t drawable = 0;  // 1 at the bar; the weight up to it
};

__extension__ typedef unsigned __int128 Wide;

/// Which rows a selection takes. The drawable rows lie side by side on a line, in index order, each as long
/// as its RowTerm says; `picks` points on that line name the rows that are taken in addition to the chosen
/// ones.
struct Cut {
  uint32_t bar = 0xFFFFFFFFu;  // rows above are chosen
  uint32_t weighted = 0;       // importance: drawn by weight; else the first `picks` rows at the bar
  uint32_t picks = 0;
  uint32_t limit = 0;   // entries that may be written: k, or the capacity
  uint64_t total = 0;   // weighted: sum of the weights of the drawable rows, below 2^63
  uint64_t offset = 0;  // weighted: the random number, in [0, total)
  double density = 0;   // weighted: picks / total, nearly

  TESSERA_HD RowTerm term(uint32_t value) const {
    if (value > bar) return {1, 0};
    if (!weighted) return {0, uint64_t(value == bar)};
    return {0, bar == 0 ? 1u : value};  // bar 0: all that have a weight are chosen, the rest are alike
  }
  /// Whether point k, at (offset + k total) / picks, lies before `place` <= total. In 128 bits, of which the
  /// products have 94.
  TESSERA_HD bool is_before(uint64_t k, uint64_t place) const {
    return Wide(offset) + Wide(k) * total < Wide(place) * picks;
  }
  /// How many points lie before `place`.
  TESSERA_HD uint32_t points_before(uint64_t place) const {
    if (!weighted) return place < picks ? uint32_t(place) : picks;
    // An estimate that is off by one at most, corrected by exact comparisons.
    const double near = double(place) * density;
    uint64_t k = near < double(picks) ? uint64_t(near) : picks;
    while (k < picks && is_before(k, place)) ++k;
    while (k > 0 && !is_before(k - 1, place)) --k;
    return uint32_t(k);
  }
  /// 1 / p of a row that was drawn by its weight (or as one of the rows without any).
  TESSERA_HD float drawn_scale(uint64_t drawable) const {
    return float(double(total) / double(uint64_t(picks) * drawable));
  }
};

/// The number of [0, total) that systematic sampling starts from.
TESSERA_HD uint64_t systematic_offset(uint64_t seed, uint64_t stream, uint64_t total) {
  return place_of(choice_bits(seed, stream, 0), total);
}

/// Scale of k random rows of `rows`.
TESSERA_HD float random_scale(uint32_t rows, uint32_t k) {
  return float(double(rows) / double(k));
}

/// The search for the bar: the largest t for which enough rows reach it. `above`: rows with values >= t;
/// `below`: sum of the values < t, without those that are certain. top_norm and random: k rows reach the bar.
/// importance: with c = 1 / t, sum min(1, c w) = above + below / t >= k. Both hold up to the bar and not
/// beyond.
TESSERA_HD bool reaches(bool weighted, uint32_t t, uint32_t k, uint32_t above, uint64_t below) {
  if (above >= k) return true;
  return weighted && uint64_t(k - above) * t <= below;
}

/// The cut at the bar that the search has found. `above`: rows with values > bar; `rest`: sum of the values
/// up to it; `rows`: those that may be chosen.
TESSERA_HD Cut cut_at(bool weighted, uint32_t bar, uint32_t k, uint32_t above, uint64_t rest, uint32_t rows,
                      uint64_t seed, uint64_t stream) {
  Cut cut;
  cut.bar = bar;
  cut.weighted = weighted;
  cut.picks = above < k ? k - above : 0;
  cut.limit = k;
  if (weighted && cut.picks > 0) {
    cut.total = bar == 0 ? rows - above : rest;
    cut.offset = systematic_offset(seed, stream, cut.total);
    cut.density = double(cut.picks) / double(cut.total);
  }
  return cut;
}
/// The largest bar: rows of weight kCertain stay above it.
TESSERA_HD uint32_t highest_bar(bool weighted) {
  return weighted ? kCertain - 1 : 0xFFFFFFFFu;
}

}  // namespace tessera::ops
