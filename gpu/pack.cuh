#pragma once

#include <bit>
#include <cstdint>

#include "tensor/dtype.h"

namespace tessera::gpu {

/// N consecutive elements that are loaded and stored as aligned words of up to 16 bytes.
template <class T, int N>
struct alignas(sizeof(T) * N < 16 ? sizeof(T) * N : 16) Pack {
  T at[N];
};

/// Elements of T in 16 bytes.
template <class T>
inline constexpr int kPackOf = 16 / int(sizeof(T));

template <int N, class T>
__device__ __forceinline__ Pack<T, N> load_pack(const T* from) {
  return *reinterpret_cast<const Pack<T, N>*>(from);
}
template <int N, class T>
__device__ __forceinline__ void store_pack(T* to, const Pack<T, N>& pack) {
  *reinterpret_cast<Pack<T, N>*>(to) = pack;
}

/// True if a pack of N elements may be read at every multiple of N elements of rows that start `row_stride`
/// apart.
template <class T>
inline bool is_pack_aligned(const T* data, int64_t row_stride, int n) {
  return reinterpret_cast<uintptr_t>(data) % (sizeof(T) * size_t(n)) == 0 && row_stride % n == 0;
}

/// 16 bytes of elements as they are in memory. Kernels that keep many loads in flight hold these and convert
/// when they compute: four registers, and no load waits for an earlier one.
template <class T>
struct alignas(16) Words {
  uint32_t word[4] = {};
};

template <class T>
__device__ __forceinline__ Words<T> load_words(const T* from) {
  return *reinterpret_cast<const Words<T>*>(from);
}
template <class T>
__device__ __forceinline__ void store_words(T* to, const Words<T>& from) {
  *reinterpret_cast<Words<T>*>(to) = from;
}

/// a if `first`, else b, word by word.
template <class T>
__device__ __forceinline__ Words<T> select(bool first, const Words<T>& a, const Words<T>& b) {
  Words<T> to;
#pragma unroll
  for (int w = 0; w < 4; ++w) to.word[w] = first ? a.word[w] : b.word[w];
  return to;
}

/// The first `count` elements, one by one; the others are 0.
template <class T>
__device__ __forceinline__ Words<T> load_part(const T* from, int count) {
  Words<T> to;
#pragma unroll
  for (int i = 0; i < kPackOf<T>; ++i) {
    if (i >= count) continue;
    if constexpr (sizeof(T) == 4) {
      to.word[i] = std::bit_cast<uint32_t>(from[i]);
    } else {
      to.word[i / 2] |= uint32_t(from[i].bits) << (i % 2 * 16);
    }
  }
  return to;
}
template <class T>
__device__ __forceinline__ void store_part(T* to, const Words<T>& from, int count) {
#pragma unroll
  for (int i = 0; i < kPackOf<T>; ++i) {
    if (i >= count) continue;
    if constexpr (sizeof(T) == 4) {
      to[i] = std::bit_cast<T>(from.word[i]);
    } else {
      to[i].bits = uint16_t(from.word[i / 2] >> (i % 2 * 16));
    }
  }
}

/// The same for an aligned pack with `count` below kPackOf<T>: at most one load each of 8, 4 and 2 bytes.
template <class T>
__device__ __forceinline__ Words<T> load_tail(const T* from, int count) {
  const char* const start = reinterpret_cast<const char*>(from);
  const int bytes = count * int(sizeof(T));
  uint2 two = {};
  uint32_t one = 0, half = 0;
  if (bytes & 8) two = *reinterpret_cast<const uint2*>(start);
  if (bytes & 4) one = *reinterpret_cast<const uint32_t*>(start + (bytes & 8));
  if (bytes & 2) half = *reinterpret_cast<const uint16_t*>(start + (bytes & 12));
  // Selected by value: an index computed at run time would send the words through local memory.
  const uint32_t low = bytes & 4 ? one : half, high = bytes & 4 ? half : 0;
  Words<T> to;
  to.word[0] = bytes & 8 ? two.x : low;
  to.word[1] = bytes & 8 ? two.y : high;
  to.word[2] = bytes & 8 ? low : 0;
  to.word[3] = bytes & 8 ? high : 0;
  return to;
}
template <class T>
__device__ __forceinline__ void store_tail(T* to, const Words<T>& from, int count) {
  char* const start = reinterpret_cast<char*>(to);
  const int bytes = count * int(sizeof(T));
  const uint32_t low = bytes & 8 ? from.word[2] : from.word[0],
                 high = bytes & 8 ? from.word[3] : from.word[1];
  if (bytes & 8) *reinterpret_cast<uint2*>(start) = {from.word[0], from.word[1]};
  if (bytes & 4) *reinterpret_cast<uint32_t*>(start + (bytes & 8)) = low;
  if (bytes & 2) *reinterpret_cast<uint16_t*>(start + (bytes & 12)) = uint16_t(bytes & 4 ? high : low);
}

/// Hides the words from the compiler: otherwise it would unpack them ahead of the loop that uses them, into
/// twice the registers.
template <class T>
__device__ __forceinline__ void keep_packed(Words<T>& words) {
  asm volatile("" : "+r"(words.word[0]), "+r"(words.word[1]), "+r"(words.word[2]), "+r"(words.word[3]));
}

/// The elements as f32.
template <class T>
__device__ __forceinline__ void unpack(float (&values)[kPackOf<T>], const Words<T>& from) {
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    const uint32_t word = from.word[w];
    if constexpr (sizeof(T) == 4) {
      values[w] = std::bit_cast<float>(word);
    } else if constexpr (std::is_same_v<T, bf16>) {
      values[2 * w] = std::bit_cast<float>(word << 16);
      values[2 * w + 1] = std::bit_cast<float>(word & 0xFFFF0000u);
    } else {
      f16 low, high;
      low.bits = uint16_t(word), high.bits = uint16_t(word >> 16);
      values[2 * w] = float(low), values[2 * w + 1] = float(high);
    }
  }
}

/// The values rounded to T. PTX ISA 9.7.9.21 (cvt): two f32 make one word, the first operand its upper half.
template <class T>
__device__ __forceinline__ Words<T> round_to_words(const float (&values)[kPackOf<T>]) {
  Words<T> to;
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    if constexpr (sizeof(T) == 4) {
      to.word[w] = std::bit_cast<uint32_t>(values[w]);
    } else if constexpr (std::is_same_v<T, bf16>) {
      asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(to.word[w]) : "f"(values[2 * w + 1]), "f"(values[2 * w]));
    } else {
      asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(to.word[w]) : "f"(values[2 * w + 1]), "f"(values[2 * w]));
    }
  }
  return to;
}

}  // namespace tessera::gpu
