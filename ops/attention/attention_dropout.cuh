#pragma once

#include <type_traits>

#include "ops/attention/attention_dropout.h"
#include "tensor/dtype.h"

/// Dropout applied to accumulators. A warp with 16 rows of a score tile and 64 columns needs the words of
/// four blocks of 16 x 16, eight words each: every lane computes one (ten rounds of Philox, 48 instructions
/// for 32 probabilities, none computed twice), and the lanes that need it read it by a shuffle, 1 or 2 per 8
/// probabilities. The bits of a word are ordered such that, after a rotation by an amount that depends on the
/// lane, the lane's bits are four positions apart, those of neighbouring columns sixteen apart. Two of the
/// latter, at the top bits of two exponents, make a packed pair of factors 2 or 0 with one logical operation,
/// which runs at half rate (the factor 1/2 goes into the factor of O); in f32, bits at the tops of bytes are
/// spread by prmt.

namespace tessera::ops {

/// prmt ("prmt.b32") with a selector whose digits 8 ... 15 spread the top bit of bytes 0 ... 7 of (low,
/// high).
__device__ __forceinline__ uint32_t spread(uint32_t low, uint32_t high, uint32_t selector) {
  uint32_t mask;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(mask) : "r"(low), "r"(high), "r"(selector));
  return mask;
}

/// Two packed halves times two others, 2 or 0 each: by fma, since older GPUs have no bf16 multiply.
template <class T>
__device__ __forceinline__ uint32_t multiply_halves(uint32_t a, uint32_t b) {
  if constexpr (std::is_same_v<T, bf16>)
    asm("fma.rn.bf16x2 %0, %0, %1, %2;" : "+r"(a) : "r"(b), "r"(0x80008000u));
  else
    asm("mul.rn.f16x2 %0, %0, %1;" : "+r"(a) : "r"(b));
  return a;
}

/// x, or 0 if the top bit of that byte of `bits` is set.
__device__ __forceinline__ float drop_by_byte(float x, uint32_t bits, uint32_t byte) {
  return __uint_as_float(__float_as_uint(x) & ~spread(bits, 0, (8 + byte) * 0x1111));
}

/// Keep bits of 16 queries (rows g and g + 8 of this lane) and 16 keys (columns 2 c, 2 c + 1, and 8 more) of
/// an accumulator or left operand, from the words that the lanes of a warp computed; `source` is the lane
/// with the word of the block's row r = 0.
struct RowBits {
  uint32_t
      bits;  // those of the lane: 2, 6, 10 and 14, row half first, then column half; 16 more: odd columns

  RowBits() = default;
  __device__ __forceinline__ RowBits(uint32_t word, int source, int lane) {
    word = __shfl_sync(0xFFFFFFFFu, word, source + lane / 4);
    bits = __funnelshift_l(word, word, uint32_t(lane % 4));
  }
  /// Drops in a 16 x 16 left operand of packed pairs: kept values are doubled, so results need a factor of
  /// 1/2.
  template <class T>
  __device__ __forceinline__ void keep_doubled(uint32_t (&a)[4]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) a[i] = multiply_halves<T>(a[i], ~(bits << (12 - 4 * i)) & 0x40004000u);
  }
  /// Element e = 2 * row half + column parity of columns below (0) or from 8 on (1).
  __device__ __forceinline__ float drop(float x, int eight, int e) const {
    return drop_by_byte(x, bits << (e / 2 ? 1 : 5), uint32_t(e % 2 * 2 + eight));
  }
};

/// The same of the transpose: rows are keys g and g + 8, columns queries 2 c, 2 c + 1, and 8 more.
struct ColumnBits {
  uint32_t low[2], high[2];  // of the column parities, columns below 8 or not; bytes 2 and 3: keys g, g + 8

  ColumnBits() = default;
  __device__ __forceinline__ ColumnBits(uint32_t word, int source, int lane) {
    const uint32_t turn = uint32_t(lane / 8 + (lane / 4 % 2 == 0 ? 21 : 5));
#pragma unroll
    for (int parity = 0; parity < 2; ++parity) {
      const uint32_t own = __shfl_sync(0xFFFFFFFFu, word, source + lane % 4 * 2 + parity);
      low[parity] = __funnelshift_l(own, own, turn);
      high[parity] = __funnelshift_r(low[parity], low[parity], 4);
    }
  }
  /// Element e = 2 * row half + column parity of columns below (0) or from 8 on (1).
  __device__ __forceinline__ float drop(float x, int eight, int e) const {
    return drop_by_byte(x, eight ? high[e % 2] : low[e % 2], uint32_t(2 + e / 2));
  }
};

}  // namespace tessera::ops
