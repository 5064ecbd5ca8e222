#pragma once

#include <type_traits>

#include "gpu/approx.cuh"
#include "ops/activation/activation_math.h"

/// The activations for the epilogues of 16-bit products, where they must hide behind tensor cores. A tile of
/// 128 x 152 of a short k has about 4,900 clocks for its epilogue and 19,456 elements; two special functions
/// each are 2,400 of them, an exp and a quotient of the library three times as much.

namespace tessera::ops {

/// f(x) and f'(x), as ops/activation/activation_math.h defines them, for results in T. silu and gelu_tanh are
/// x times the logistic function, of x and of twice tanh's argument. For bf16 it is made of one special
/// function, within 2^-12 (its tanh is good to 2^-11): a quarter of the rounding of bf16 numbers around 1.
/// For f16 of two, within about 2^-21.
template <class T, Activation kKind>
struct ActivationApprox {
  static __device__ __forceinline__ float value(float x) {
    if constexpr (kKind == Activation::silu) return gated(x, 0.5f * x).value;
    if constexpr (kKind == Activation::gelu_tanh) return gated(x, inner(x)).value;
    if constexpr (kKind == Activation::gelu) return x * normal(x).below;
    return activate<kKind>(x);
  }
  /// f'(x); f(x) comes with it, the same bits as above.
  static __device__ __forceinline__ float slope(float x, float& value) {
    if constexpr (kKind == Activation::silu) {
      const Gated of = gated(x, 0.5f * x);
      value = of.value;
      return of.share + fmaf(-value, of.share, value);
    }
    if constexpr (kKind == Activation::gelu_tanh) {
      const Gated of = gated(x, inner(x));
      value = of.value;
      // The first factor is 0 where |x| is large; an infinite square (|x| > 1.8e19) would make that NaN.
      const float square = fminf(x * x, 1e38f);
      return fmaf(fmaf(-value, of.share, value), fmaf(0.21406445f, square, 1.5957691216057308f), of.share);
    }
    if constexpr (kKind == Activation::gelu) {
      const Normal at = normal(x);
      value = x * at.below;
      return fmaf(x * 0.39894228040143268f, at.bell, at.below);
    }
    value = activate<kKind>(x);
    return activate_slope<kKind>(x);
  }

 private:
  struct Gated {
    float share, value;  // 1 / (1 + exp(-2 u)), which is (1 + tanh(u)) / 2, and x times that
  };
  static __device__ __forceinline__ Gated gated(float x, float u) {
    if constexpr (std::is_same_v<T, bf16>) {
      const float half = 0.5f * x, t = gpu::tanh_approx(u);
      return {fmaf(0.5f, t, 0.5f), fmaf(half, t, half)};
    } else {
      const float share = gpu::reciprocal_approx(1.0f + gpu::exp2_approx(u * -2.8853900817779268f));
      return {share, x * share};
    }
  }
  /// What gelu_tanh takes the tanh of.
  static __device__ __forceinline__ float inner(float x) {
    return x * fmaf(0.035677408136f, x * x, 0.79788456080286536f);
  }

  struct Normal {
    float below, bell;  // the distribution within 1e-7, and exp(-x^2 / 2), which it is made of
  };
  /// Abramowitz, Stegun, Handbook of Mathematical Functions, 7.1.26.
  static __device__ __forceinline__ Normal normal(float x) {
    const float bell = gpu::exp2_approx(x * x * -0.72134752044448170f),
                t = gpu::reciprocal_approx(fmaf(0.23164188f, fabsf(x), 1.0f));
    float tail = fmaf(t, 0.5307027145f, -0.7265760135f);
    tail = fmaf(t, tail, 0.7107068705f);
    tail = fmaf(t, tail, -0.142248368f);
    tail = fmaf(t, tail, 0.127414796f) * t * bell;
    return {x < 0 ? tail : 1.0f - tail, bell};
  }
};

}  // namespace tessera::ops
