#pragma once

#include "gpu/pack.cuh"

/// Entries of sell_delta4 (ops/sparse_linear/sparse_weight.h) times x from shared memory: a lane has a row of
/// a slice, of which a chunk holds 8 entries. The distances of a chunk are added up in bytes, all eight in
/// five instructions; a dot product of bytes (dp4a) adds one of the sums to the lane's place in x, so an
/// entry costs little more than four instructions: place, x from shared memory, conversion, multiply-add.
///
/// Entries that fill distances and rows have value 0 and are multiplied like others: where x is infinite or
/// NaN in a column that they lie in, the row becomes NaN though its weight there is 0.

namespace tessera::ops::sparse {

/// A chunk of one row.
struct SellChunk {
  uint4 values{};
  uint32_t gaps = 0;

  __device__ __forceinline__ void load(const uint4* from, const uint32_t* gaps_from) {
    asm volatile("ld.global.L1::no_allocate.L2::256B.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(values.x), "=r"(values.y), "=r"(values.z), "=r"(values.w)
                 : "l"(from));
    asm volatile("ld.global.L1::no_allocate.L2::256B.u32 %0, [%1];" : "=r"(gaps) : "l"(gaps_from));
  }
};

/// The two elements of a word.
template <class T>
__device__ __forceinline__ float2 unpack_pair(uint32_t word) {
  T low, high;
  low.bits = uint16_t(word), high.bits = uint16_t(word >> 16);
  return {float(low), float(high)};
}

/// Adds value times the tokens' x at `from`.
template <class T, int kTokens>
__device__ __forceinline__ void add_entry(float (&sum)[kTokens], float value, uint32_t from) {
  if constexpr (kTokens == 1) {
    float x;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(from));
    sum[0] = fmaf(value, x, sum[0]);
  } else {
    uint32_t words[kTokens / 2];
    if constexpr (kTokens == 2)
      asm volatile("ld.shared.u32 %0, [%1];" : "=r"(words[0]) : "r"(from));
    else if constexpr (kTokens == 4)
      asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(words[0]), "=r"(words[1]) : "r"(from));
    else
      asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                   : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                   : "r"(from));
#pragma unroll
    for (int w = 0; w < kTokens / 2; ++w) {
      const float2 x = unpack_pair<T>(words[w]);
      sum[2 * w] = fmaf(value, x.x, sum[2 * w]);
      sum[2 * w + 1] = fmaf(value, x.y, sum[2 * w + 1]);
    }
  }
}

/// The distances of a chunk, added up: byte w of `first` and `second` has those up to entries 2w and 2w + 1.
/// At most 8 x 15, so no byte overflows.
struct SellDistances {
  uint32_t first, second;

  __device__ __forceinline__ explicit SellDistances(uint32_t gaps) {
    const uint32_t even = gaps & 0x0F0F0F0Fu, pairs = even + (gaps >> 4 & 0x0F0F0F0Fu),
                   before = pairs * 0x01010100u;
    first = before + even, second = before + pairs;
  }
  /// Where entry e of a lane at `place` finds x; `place`: of the column after the entry before.
  template <uint32_t kBytes>
  __device__ __forceinline__ uint32_t at(uint32_t place, int e) const {
    return __dp4a(e % 2 ? second : first, kBytes << e / 2 * 8, place) + uint32_t(e) * kBytes;
  }
  /// The lane's place after the chunk.
  template <uint32_t kBytes>
  __device__ __forceinline__ uint32_t after(uint32_t place) const {
    return __dp4a(second, kBytes << 24, place) + 8 * kBytes;
  }
};

/// Adds the products of a chunk. `place`: of the column after the entry before, and then after the last one.
template <class T, class Shape>
__device__ __forceinline__ void add_chunk(float (&sum)[Shape::kTokens], const SellChunk& chunk,
                                          uint32_t& place) {
  constexpr uint32_t kBytes = Shape::kBytes;
  const SellDistances distances(chunk.gaps);
  const uint32_t words[4] = {chunk.values.x, chunk.values.y, chunk.values.z, chunk.values.w};
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    const float2 value = unpack_pair<T>(words[w]);
    add_entry<T>(sum, value.x, distances.at<kBytes>(place, 2 * w));
    add_entry<T>(sum, value.y, distances.at<kBytes>(place, 2 * w + 1));
  }
  place = distances.after<kBytes>(place);
}

}  // namespace tessera::ops::sparse
