#pragma once

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
inline bool packs(const T* data, int64_t row_stride, int n) {
  return reinterpret_cast<uintptr_t>(data) % (sizeof(T) * size_t(n)) == 0 && row_stride % n == 0;
}

}  // namespace tessera::gpu
