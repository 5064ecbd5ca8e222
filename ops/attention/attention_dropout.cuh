#pragma once

#include "ops/attention/attention_dropout.h"

/// Dropout in the accumulators of tensor cores. A warp that has 16 rows of a score tile and 64 columns needs
/// the words of four blocks of 16 x 16, eight each: every lane makes one (two Philox blocks, 64 instructions
/// for 32 probabilities, none of them made twice), and those who need it take it by a shuffle, 1 or 2 for 8
/// probabilities. The order of a word's bits is such that a shift by an amount of the lane's own brings its
/// bits to the tops of bytes, which prmt spreads over a half or a whole register: 4 shifts, masks and ands
/// for every 2 to 4 probabilities.
///
/// In all, instructions for each probability: 2.0 for the words, 1.4 to drop in a packed left operand, 2.8 to
/// drop in f32 of the transpose.

namespace tessera::ops {

/// prmt ("prmt.b32") with a selector whose digits 8 ... 15 spread the top bit of bytes 0 ... 7 of (low,
/// high).
__device__ __forceinline__ uint32_t spread(uint32_t low, uint32_t high, uint32_t selector) {
  uint32_t mask;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(mask) : "r"(low), "r"(high), "r"(selector));
  return mask;
}

/// x, or 0 if the top bit of that byte of `bits` is set.
__device__ __forceinline__ float drop_by_byte(float x, uint32_t bits, uint32_t byte) {
  return __uint_as_float(__float_as_uint(x) & ~spread(bits, 0, (8 + byte) * 0x1111));
}

/// The bits of 16 queries (rows g and g + 8 of this lane) and 16 keys (columns 2 c, 2 c + 1, and 8 more) of
/// an accumulator or left operand, from the words that the lanes of a warp have; `source` is the lane that
/// has that of r = 0 of the block.
struct RowBits {
  uint32_t low, high;  // columns below 8 and from 8 on; bytes: row half, then column parity

  RowBits() = default;
  __device__ __forceinline__ RowBits(uint32_t word, int source, int lane) {
    low = __shfl_sync(0xFFFFFFFFu, word, source + lane / 4) << (lane % 4);
    high = low << 4;
  }
  /// A left operand of 16 x 16, as packed pairs.
  __device__ __forceinline__ void drop(uint32_t (&a)[4]) const {
    a[0] &= ~spread(low, 0, 0x9988);
    a[1] &= ~spread(low, 0, 0xBBAA);
    a[2] &= ~spread(high, 0, 0x9988);
    a[3] &= ~spread(high, 0, 0xBBAA);
  }
  /// Element e = 2 * row half + column parity of columns below (0) or from 8 on (1).
  __device__ __forceinline__ float drop(float x, int eight, int e) const {
    return drop_by_byte(x, eight ? high : low, uint32_t(e));
  }
};

/// The same of the transpose: rows are keys g and g + 8, columns queries 2 c, 2 c + 1, and 8 more.
struct ColumnBits {
  uint32_t low[2],
      high[2];  // of the column parities: keys g and g + 8; bytes 1 and 3: columns below 8, or not

  ColumnBits() = default;
  __device__ __forceinline__ ColumnBits(uint32_t word, int source, int lane) {
    const int shift = lane / 8 + (lane / 4 % 2 == 0 ? 8 : 0);
#pragma unroll
    for (int parity = 0; parity < 2; ++parity) {
      low[parity] = __shfl_sync(0xFFFFFFFFu, word, source + lane % 4 * 2 + parity) << shift;
      high[parity] = low[parity] << 4;
    }
  }
  /// Element e = 2 * row half + column parity of columns below (0) or from 8 on (1).
  __device__ __forceinline__ float drop(float x, int eight, int e) const {
    return drop_by_byte(x, e / 2 ? high[e % 2] : low[e % 2], eight ? 3 : 1);
  }
};

}  // namespace tessera::ops
