#pragma once

#include <cstdint>

#include "runtime/config.h"

/// The selection of 2:4 in two groups of 16-bit elements at once, one in each half of a 32-bit register, and
/// the exchanges among the four lanes of a quad that bring groups and metadata to the lanes that store them.
/// Kernels use these functions between their loads, shuffles and stores; tests/ops/packed24_test.cpp runs the
/// same functions lane by lane on the CPU.
///
/// Magnitudes have 15 bits. With the highest bit of both halves of m_i set, m_i - m_j borrows nothing across
/// the halves, and leaves that bit set where m_i >= m_j: six subtractions compare two groups, and everything
/// after them is bitwise logic. Two groups take some 43 instructions, one at a time by comparisons and
/// selections (sparse24_math.h) about 60 each.

namespace tessera::ops::sparse24 {

/// prmt: byte i of the result is byte (selector >> 4 i & 7) of b:a, a's bytes first.
TESSERA_HD uint32_t permute_bytes(uint32_t a, uint32_t b, uint32_t selector) {
#if defined(__CUDA_ARCH__)
  return __byte_perm(a, b, selector);
#else
  const uint64_t both = uint64_t(b) << 32 | a;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) result |= uint32_t(both >> 8 * (selector >> 4 * i & 7) & 0xFF) << 8 * i;
  return result;
#endif
}
/// All bits of the halves whose highest bit is set. On a GPU one prmt that replicates signs.
TESSERA_HD uint32_t spread_signs(uint32_t halves) {
#if defined(__CUDA_ARCH__)
  uint32_t spread;
  asm("prmt.b32 %0, %1, %1, 0xBB99;" : "=r"(spread) : "r"(halves));
  return spread;
#else
  return (halves >> 15 & 0x00010001u) * 0xFFFFu;
#endif
}

/// Element i of one group in the low half of x[i], of another in the high half.
struct TwoGroups {
  uint32_t x[4];

  /// From elements 0, 1 and 2, 3 of each group.
  static TESSERA_HD TwoGroups of(uint32_t low01, uint32_t low23, uint32_t high01, uint32_t high23) {
    return {{permute_bytes(low01, high01, 0x5410), permute_bytes(low01, high01, 0x7632),
             permute_bytes(low23, high23, 0x5410), permute_bytes(low23, high23, 0x7632)}};
  }
};

/// Two kept elements of each group: first and second of the low one, and of the high one.
struct TwoPairs {
  uint32_t low, high;
};

/// Which elements are kept: the highest bits of the halves.
struct TwoChoices {
  uint32_t keeps[4];

  /// Four bits per group, positions of the first and the second kept element: bits 0 ... 3 of each half.
  TESSERA_HD uint32_t nibbles() const {
    const uint32_t first0 = ~keeps[0] & keeps[1], first1 = ~keeps[0] & ~keeps[1],
                   second0 = keeps[3] | ~keeps[2], second1 = keeps[3] | keeps[2];
    return (first0 >> 15 & 0x00010001u) | (first1 >> 14 & 0x00020002u) | (second0 >> 13 & 0x00040004u) |
           (second1 >> 12 & 0x00080008u);
  }
  TESSERA_HD TwoPairs of(const TwoGroups& groups) const {
    const uint32_t m0 = spread_signs(keeps[0]), m1 = spread_signs(keeps[1]), m2 = spread_signs(keeps[2]),
                   m3 = spread_signs(keeps[3]);
    const uint32_t(&x)[4] = groups.x;
    const uint32_t first = (m0 & x[0]) | (~m0 & ((m1 & x[1]) | (~m1 & x[2]))),
                   second = (m3 & x[3]) | (~m3 & ((m2 & x[2]) | (~m2 & x[1])));
    return {permute_bytes(first, second, 0x5410), permute_bytes(first, second, 0x7632)};
  }
};

/// The two of largest magnitude, of equal ones the lower index: two_largest() of both groups. An element is
/// kept if it wins two of its three comparisons.
TESSERA_HD TwoChoices choose_largest(const TwoGroups& groups) {
  constexpr uint32_t kSigns = 0x80008000u;
  uint32_t m[4];
  for (int i = 0; i < 4; ++i) m[i] = groups.x[i] & ~kSigns;
  const uint32_t w01 = (m[0] | kSigns) - m[1], w02 = (m[0] | kSigns) - m[2], w03 = (m[0] | kSigns) - m[3],
                 w12 = (m[1] | kSigns) - m[2], w13 = (m[1] | kSigns) - m[3], w23 = (m[2] | kSigns) - m[3];
  const auto two_of = [](uint32_t a, uint32_t b, uint32_t c) { return (a & b) | (c & (a | b)); };
  return {{two_of(w01, w02, w03), two_of(~w01, w12, w13), two_of(~w02, ~w12, w23), two_of(~w03, ~w13, ~w23)}};
}

/// The elements of a group (0, 1 in x01; 2, 3 in x23) at the positions in bits 0 ... 3 of `nibble`.
TESSERA_HD uint32_t gather_pair(uint32_t x01, uint32_t x23, uint32_t nibble) {
  // Element p is bytes 2p and 2p + 1.
  return permute_bytes(x01, x23, 0x1010u + (nibble & 3) * 0x22u + (nibble >> 2 & 3) * 0x2200u);
}

/// A group in two words.
struct GroupWords {
  uint32_t x01, x23;
};
/// The reverse: `rest` with its elements at these positions replaced by the pair.
TESSERA_HD GroupWords scatter_pair(uint32_t pair, uint32_t nibble, GroupWords rest) {
  // Two selector nibbles per element: the element's own bytes of the second operand, else the pair's.
  const int first = int(nibble & 3) * 8, second = int(nibble >> 2 & 3) * 8;
  const uint32_t selector =
      (0x76547654u & ~(0xFFu << first | 0xFFu << second)) | 0x10u << first | 0x32u << second;
  return {permute_bytes(pair, rest.x01, selector), permute_bytes(pair, rest.x23, selector >> 16)};
}

// ---- groups along tokens, from a tile [token, feature] in shared memory ----

/// ldmatrix.x4.trans gives lane (g, c) the elements 2c and 2c + 1 of column g of four 8 x 8 matrices. Their
/// rows are chosen so that these are tokens 4c ... 4c + 3 of 16 (number 2 step + half of the tile's four):
/// the first two matrices of features 0 ... 7, the others of 8 ... 15 of the warp's. Lane `lane` names the
/// row of token tokens_row() and, within it, the 16 bytes from feature tokens_column() on.
TESSERA_HD int tokens_row(int lane, int number) {
  return number * 16 + lane % 8 / 2 * 4 + lane / 8 % 2 * 2 + lane % 2;
}
TESSERA_HD int tokens_column(int lane) {
  return lane / 16 * 8;
}

// ---- the four lanes of a quad, c = 0 ... 3 ----

/// A lane's nibbles: number 2 step + half of its groups of row 16 w + g in bits 0 ... 15, of row + 8 in bits
/// 16 ... 31. The word of the metadata that lane c stores has those of number c of all four lanes, in both
/// halves: the transpose of 4 x 4 nibbles, which two exchanges make (with the lane at distance 1, then 2).
/// What lane c has after exchange 0 or 1, of what it and the other lane had. The transpose is its own
/// inverse.
TESSERA_HD uint32_t exchanged_nibbles(uint32_t own, uint32_t received, int c, int exchange) {
  const uint32_t lower = exchange == 0 ? 0x0F0F0F0Fu : 0x00FF00FFu;
  const int distance = exchange == 0 ? 4 : 8;
  return c >> exchange & 1 ? (own & ~lower) | (received & ~lower) >> distance
                           : (own & lower) | (received & lower) << distance;
}

/// Accumulators of wgmma: lane c has columns 8 b + 2c and the next of two blocks b = 0, 1, a pair each. The
/// one that it sends to the lane at distance 1; after that an even lane has four columns of block 0, an odd
/// one of block 1.
TESSERA_HD uint32_t sent_pair(uint32_t block0, uint32_t block1, int c) {
  return c & 1 ? block0 : block1;
}
TESSERA_HD GroupWords group_of_pairs(uint32_t block0, uint32_t block1, uint32_t received, int c) {
  return c & 1 ? GroupWords{received, block1} : GroupWords{block0, received};
}
/// Of the four groups of the two blocks, the one that lane c then has; its fragment takes group c. Its own
/// inverse: lane group_of_lane(c) has what lane c stores.
TESSERA_HD int group_of_lane(int c) {
  return c >> 1 | (c & 1) << 1;
}

}  // namespace tessera::ops::sparse24
