#pragma once

#include "gpu/approx.cuh"

namespace tessera::ops {

/// exp(x) for x <= 0 in sums and shares of softmax kernels, as exact as the dtype T of their inputs asks for.
/// 16 bits: the hardware's power of two; rounding its argument x log2(e) costs |x| 2^-24 of the result, which
/// is small where the result is not. f32: expf.
template <class T>
__device__ __forceinline__ float exponential(float x) {
  if constexpr (sizeof(T) == 2) {
    return gpu::exp2_approx(x * 1.4426950408889634f);
  } else {
    return expf(x);
  }
}

}  // namespace tessera::ops
