#pragma once

#include "gpu/mma.cuh"
#include "ops/activation/activation_math.h"

/// The activations for the epilogues of 16-bit products, where they must hide behind tensor cores: one
/// special-function instruction where the plain form has an exponential and a division. tanh.approx.f32 is
/// off by at most 2^-11 of tanh (PTX ISA, "tanh"), so that silu and gelu_tanh are off by half a unit in the
/// last place of f16. The normal distribution of gelu is by Abramowitz and Stegun, 7.1.26 (1.5e-7).

namespace tessera::ops {

__device__ __forceinline__ float fast_tanh(float x) {
  float y;
  asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// The normal distribution at x and exp(-x^2 / 2).
struct NormalAt {
  float below, bell;
};
__device__ __forceinline__ NormalAt fast_normal(float x) {
  const float z = fabsf(x) * 0.70710678f;
  float t;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(t) : "f"(fmaf(0.3275911f, z, 1.0f)));
  const float bell = gpu::exp2_approx(-1.44269504f * z * z);
  float tail = fmaf(t, 1.061405429f, -1.453152027f);
  tail = fmaf(t, tail, 1.421413741f);
  tail = fmaf(t, tail, -0.284496736f);
  tail = fmaf(t, tail, 0.254829592f) * t * bell * 0.5f;
  return {x < 0 ? tail : 1.0f - tail, bell};
}

/// f(x), and f'(x) with it.
struct ValueAndSlope {
  float value, slope;
};

template <Activation kKind>
__device__ __forceinline__ float fast_activate(float x) {
  if constexpr (kKind == Activation::silu) {
    const float half = 0.5f * x;
    return fmaf(half, fast_tanh(half), half);
  } else if constexpr (kKind == Activation::gelu_tanh) {
    const float half = 0.5f * x;
    return fmaf(half, fast_tanh(x * fmaf(0.035677408136f, x * x, 0.79788456080f)), half);
  } else if constexpr (kKind == Activation::gelu) {
    return x * fast_normal(x).below;
  } else {
    return activate<kKind>(x);
  }
}

template <Activation kKind>
__device__ __forceinline__ ValueAndSlope fast_activate_and_slope(float x) {
  if constexpr (kKind == Activation::silu) {
    const float s = fmaf(0.5f, fast_tanh(0.5f * x), 0.5f), value = x * s;
    return {value, fmaf(value, 1.0f - s, s)};
  } else if constexpr (kKind == Activation::gelu_tanh) {
    const float x2 = x * x, half = 0.5f * x;
    const float t = fast_tanh(x * fmaf(0.035677408136f, x2, 0.79788456080f));
    const float inner_slope = fmaf(0.107032224409f, x2, 0.79788456080f);
    return {fmaf(half, t, half), fmaf(half * (1.0f - t * t), inner_slope, fmaf(0.5f, t, 0.5f))};
  } else if constexpr (kKind == Activation::gelu) {
    const NormalAt normal = fast_normal(x);
    return {x * normal.below, fmaf(x * 0.39894228f, normal.bell, normal.below)};
  } else {
    return {activate<kKind>(x), activate_slope<kKind>(x)};
  }
}

}  // namespace tessera::ops
