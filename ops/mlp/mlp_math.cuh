#pragma once

#include "gpu/mma.cuh"
#include "ops/activation/activation_math.h"
#include "ops/matmul/gemm_sm90_store.cuh"

/// What the products of an mlp do to their sums: the activations by the special function units, and the
/// epilogues made of them. A tile of 128 x 152 of a short k has about 4,900 clocks for its epilogue and
/// 19,456 elements; two special functions each are 2,400 of them, an exp and a quotient of the library three
/// times as much.

namespace tessera::ops {

__device__ __forceinline__ float reciprocal_approx(float x) {
  float quotient;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(quotient) : "f"(x));
  return quotient;
}
/// 1 / (1 + exp(-x)), relative error about 2^-21; 0 where exp(-x) overflows.
__device__ __forceinline__ float logistic_approx(float x) {
  return reciprocal_approx(1.0f + gpu::exp2_approx(x * -1.4426950408889634f));
}
/// Phi(x) within 1e-7, and exp(-x^2 / 2), which it is made of: Abramowitz, Stegun, Handbook of Mathematical
/// Functions, 7.1.26.
__device__ __forceinline__ float normal_approx(float x, float& bell) {
  bell = gpu::exp2_approx(x * x * -0.72134752044448170f);
  const float t = reciprocal_approx(fmaf(0.23164188f, fabsf(x), 1.0f));
  float tail = fmaf(t, 0.5307027145f, -0.7265760135f);
  tail = fmaf(t, tail, 0.7107068705f);
  tail = fmaf(t, tail, -0.142248368f);
  tail = fmaf(t, tail, 0.127414796f) * t * bell;
  return x < 0 ? tail : 1.0f - tail;
}

/// The same by one special function, within 2^-12 (its tanh is good to 2^-11): a quarter of the rounding of
/// bf16 numbers around 1.
__device__ __forceinline__ float logistic_by_tanh(float x) {
  float y;
  asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(0.5f * x));
  return fmaf(0.5f, y, 0.5f);
}

/// f(x) and f'(x), as ops/activation/activation_math.h defines them, for results in T.
template <class T, Activation kKind>
struct ActivationApprox {
  static __device__ __forceinline__ float logistic(float x) {
    return std::is_same_v<T, bf16> ? logistic_by_tanh(x) : logistic_approx(x);
  }
  static __device__ __forceinline__ float value(float x) {
    if constexpr (kKind == Activation::silu) return x * logistic(x);
    // (1 + tanh(u)) / 2 is the logistic function of 2 u.
    if constexpr (kKind == Activation::gelu_tanh) return x * logistic(twice_inner(x));
    if constexpr (kKind == Activation::gelu) {
      float bell;
      return x * normal_approx(x, bell);
    }
    return activate<kKind>(x);
  }
  /// f'(x); f(x) comes with it.
  static __device__ __forceinline__ float slope(float x, float& value) {
    if constexpr (kKind == Activation::silu) {
      const float s = logistic(x);
      value = x * s;
      return s + fmaf(-value, s, value);
    }
    if constexpr (kKind == Activation::gelu_tanh) {
      const float s = logistic(twice_inner(x));
      value = x * s;
      return s + value * (1.0f - s) * (1.5957691216057308f + 0.21406445f * x * x);
    }
    if constexpr (kKind == Activation::gelu) {
      float bell;
      const float cdf = normal_approx(x, bell);
      value = x * cdf;
      return fmaf(x * 0.39894228040143268f, bell, cdf);
    }
    value = activate<kKind>(x);
    return activate_slope<kKind>(x);
  }

 private:
  static __device__ __forceinline__ float twice_inner(float x) {
    return x * (1.5957691216057308f + 0.071354816f * x * x);
  }
};

/// h = x + bias, a = f(h): both rounded to T, a from the rounded h. Outputs: a, then h if it is kept.
template <class T, Activation kKind, bool kKeep>
struct Activate {
  static constexpr int kOutputs = kKeep ? 2 : 1;
  static constexpr bool kOperand = false;
  ProductBias<T> bias;

  __device__ __forceinline__ float2 columns(int batch, int column) const { return bias.at(batch, column); }
  __device__ __forceinline__ void operator()(float x0, float x1, float2 added, uint32_t,
                                             uint32_t (&outputs)[kOutputs]) const {
    const uint32_t rounded = gpu::pack_halves<T>(x0 + added.x, x1 + added.y);
    const float2 h = unpack_halves<T>(rounded);
    outputs[0] =
        gpu::pack_halves<T>(ActivationApprox<T, kKind>::value(h.x), ActivationApprox<T, kKind>::value(h.y));
    if constexpr (kKeep) outputs[1] = rounded;
  }
};

/// dh = da f'(h) with da rounded to T; a = f(h). The operand is h. Outputs: dh, then a if it is wanted.
template <class T, Activation kKind, bool kValue>
struct Slope {
  static constexpr int kOutputs = kValue ? 2 : 1;
  static constexpr bool kOperand = true;

  __device__ __forceinline__ int columns(int, int) const { return 0; }
  __device__ __forceinline__ void operator()(float x0, float x1, int, uint32_t operand,
                                             uint32_t (&outputs)[kOutputs]) const {
    const float2 da = unpack_halves<T>(gpu::pack_halves<T>(x0, x1)), h = unpack_halves<T>(operand);
    float a0, a1;
    const float slope0 = ActivationApprox<T, kKind>::slope(h.x, a0),
                slope1 = ActivationApprox<T, kKind>::slope(h.y, a1);
    outputs[0] = gpu::pack_halves<T>(da.x * slope0, da.y * slope1);
    if constexpr (kValue) outputs[1] = gpu::pack_halves<T>(a0, a1);
  }
};

}  // namespace tessera::ops
