#pragma once

#include "ops/dropout/philox_keys.h"
#include "runtime/rng.h"

namespace tessera::ops {

/// Which probabilities attention drops: a function of the stream, the head and the positions of query and key
/// within their sequence, independent of the kernel.
///
/// A probability is dropped with probability t / 256. The bits of one word decide for queries r and r + 8 (r
/// = 0
/// ... 7) of a block of 16 queries and for the 16 keys of a block. It is made of eight random words, one a
/// binary digit, the least significant first: place n is dropped if the number whose digits are the n-th bits
/// of the words, inverted, is below t, and this is found for all 32 places at once. The words are what
/// Philox4x32 has after 7 rounds, the fewest that pass BigCrush, and after all 10 (ops::dropout takes those
/// alone), with the stream's seed as key and as counter
///   8 (key / 16) + r, query / 16, the stream's number, head row
/// the last two modulo 2^32. The head row is that of the first query: b Lq H + h in batch b, or with
/// sequences starts[s] H + h. The order of bits (place_of) suits the accumulators of tensor cores, of S and
/// of its transpose alike: see attention_dropout.cuh.
struct AttentionDropout {
  static constexpr int kPlanes = 8;

  const uint64_t* base = nullptr;  // as in RandomStream
  uint32_t delta = 0;              // modulo 2^32
  PhiloxKeys<10> philox;
  uint32_t planes[kPlanes] = {};  // all bits are bit n of t
  float keep = 1;                 // (256 - t) / 256
  float scale = 1;                // 1 / keep

  AttentionDropout() = default;
  /// t is 256 p, rounded, at most 255; if it is 0 nothing is dropped.
  AttentionDropout(double p, const RandomStream& stream)
      : base(stream.base), delta(uint32_t(stream.delta)), philox(stream.seed) {
    const uint32_t t = threshold(p);
    for (int n = 0; n < kPlanes; ++n) planes[n] = t >> n & 1u ? ~0u : 0u;
    keep = float(256 - t) / 256;
    scale = 256 / float(256 - t);
  }
  static uint32_t threshold(double p) {
    const auto t = uint32_t(p * 256 + 0.5);
    return t < 255 ? t : 255;
  }

  bool drops() const { return keep < 1; }
  TESSERA_HD uint32_t stream() const { return (base ? uint32_t(*base) : 0u) + delta; }

  /// The word of queries 16 query_block + r and + r + 8 and keys 16 key_block ... + 15, where `place` is 8
  /// key_block + r: a bit is set where the probability is dropped.
  TESSERA_HD uint32_t word(uint32_t stream, uint32_t head_row, uint32_t query_block, uint32_t place) const {
    uint32_t dropped = 0;
    Uint4 random{{place, query_block, stream, head_row}};
    for (uint32_t half = 0; half < 2; ++half) {
      random = half == 0 ? philox.rounds<0, 7>(random) : philox.rounds<7, 10>(random);
      for (int n = 0; n < 4; ++n) {
        // Where t has a 1: below if the digit is 0 or the digits so far are below; else if both.
        const uint32_t digit = random.word[n], bit = planes[4 * half + uint32_t(n)];
        dropped = (digit & dropped) | (bit & (digit | dropped));
      }
    }
    return dropped;
  }
  /// The bit of query i and key j in their word.
  TESSERA_HD static constexpr int place_of(int64_t i, int64_t j) {
    return int((16 * (j % 2) + 4 * (i / 8 % 2) + 8 * (j / 8 % 2) + 34 - j % 8 / 2) % 32);
  }

  /// On the host: whether keys 0 ... count - 1 are dropped for query i.
  void row(uint32_t head_row, int64_t i, int64_t count, uint8_t* dropped) const {
    const uint32_t number = stream();
    for (int64_t first = 0; first < count; first += 16) {
      const uint32_t bits = word(number, head_row, uint32_t(i / 16), uint32_t(first / 2 + i % 8));
      for (int64_t j = first; j < count && j < first + 16; ++j) dropped[j] = bits >> place_of(i, j) & 1u;
    }
  }
};

/// The head row of head h for the sequence that starts at row `first` of batch b, of batches of `length`
/// rows.
TESSERA_HD uint32_t drop_head_row(uint32_t b, int64_t length, int64_t first, int64_t heads, uint32_t h) {
  return (b * uint32_t(length) + uint32_t(first)) * uint32_t(heads) + h;
}

}  // namespace tessera::ops
