#pragma once

#include <cstdint>
#include <type_traits>

#include "tensor/dtype.h"

namespace tessera {

/// n elements in the arithmetic type, and back, rounded; packed or `stride` elements apart (0: the same one).
/// Loops of their own, for kernels on the CPU: the compiler vectorises a conversion of 16 bits by itself, and
/// hardly ever among the arithmetic around it.
template <class T>
void widen(Compute<T>* to, const T* from, int64_t n, int64_t stride = 1) {
  if (stride == 1) {
    for (int64_t i = 0; i < n; ++i) to[i] = Compute<T>(from[i]);
  } else if (stride == 0) {
    const auto value = n > 0 ? Compute<T>(*from) : Compute<T>(0);
    for (int64_t i = 0; i < n; ++i) to[i] = value;
  } else {
    for (int64_t i = 0; i < n; ++i) to[i] = Compute<T>(from[i * stride]);
  }
}
template <class T>
void narrow(T* to, const Compute<T>* from, int64_t n, int64_t stride = 1) {
  if (stride == 1) {
    for (int64_t i = 0; i < n; ++i) to[i] = T(from[i]);
  } else {
    for (int64_t i = 0; i < n; ++i) to[i * stride] = T(from[i]);
  }
}

}  // namespace tessera

#if !defined(__CUDACC__)  // where nothing is converted by rows on the host
namespace tessera {

/// By F16C where the build's CPU has it (TESSERA_CPU), five times as fast as in integers; the bits are the
/// same.
template <>
void widen<f16>(float* to, const f16* from, int64_t n, int64_t stride);
template <>
void narrow<f16>(f16* to, const float* from, int64_t n, int64_t stride);

}  // namespace tessera
#endif
