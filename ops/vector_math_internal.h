#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

/// Functions of f32 as plain arithmetic without branches, which vectorises where those of the C library do
/// not.

namespace tessera::ops {

/// e^x = 2^n fraction: Cody and Waite's reduction x = n ln 2 + r, and a polynomial of degree 6 in r, summed
/// as a tree, since the latency of a chain is what these functions would wait for. `bits`: those of 1.5 *
/// 2^23 + n, whose low ones are n.
struct SplitExponential {
  float fraction;
  uint32_t bits;
};
[[gnu::always_inline]] inline SplitExponential split_exponential(float x) {
  const float shifted = x * 1.44269504f + 12582912.0f;
  const float n = shifted - 12582912.0f;
  const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f, square = r * r;
  const float high =
      (1.9875691500e-4f * r + 1.3981999507e-3f) * square + (8.3334519073e-3f * r + 4.1665795894e-2f);
  const float y = high * square + (1.6666665459e-1f * r + 5.0000001201e-1f);
  return {y * square + r + 1.0f, std::bit_cast<uint32_t>(shifted)};
}

/// e^x for -87.33 <= x <= 88.72, where it and 2^n are normal numbers: n is added to the fraction's exponent.
[[gnu::always_inline]] inline float normal_exponential(float x) {
  const auto [fraction, bits] = split_exponential(x);
  return std::bit_cast<float>(std::bit_cast<uint32_t>(fraction) + (bits << 23));
}

/// e^x to within 1 ulp. 0 below 2^-126, infinity above 88.72, NaN for NaN.
[[gnu::always_inline]] inline float vector_exponential(float x) {
  const float result = normal_exponential(x);
  const float bounded = x <= 88.72283f ? result : x * std::numeric_limits<float>::infinity();
  return x < -87.33654f ? 0.0f : bounded;
}

/// tanh x to within 2 ulp; NaN for NaN. Near 0 an odd polynomial of degree 11 (minimax in the relative
/// error), else 1 - 2 / (e^2|x| + 1).
inline float vector_tanh(float x) {
  const float square = x * x, size = std::fabs(x);
  float y = -0.005590996f;
  y = y * square + 0.0205388f;
  y = y * square - 0.05370965f;
  y = y * square + 0.13331091f;
  y = y * square - 0.33333269f;
  const float near = y * square * x + x;
  const float far = 1.0f - 2.0f / (vector_exponential(2.0f * size) + 1.0f);
  return std::copysign(size < 0.62f ? near : far, x);  // of -0, too
}

/// Of the standard normal distribution: Phi(x), and e^(-x^2/2), its density times sqrt(2 pi).
template <class C>
struct NormalDistribution {
  C cdf, bell;
};

/// Near 0 Phi is 1/2 plus an odd polynomial of degree 9; else its tail is e^(-x^2/2) times a quotient of
/// polynomials in |x|, to within 4e-5 of itself down to Phi(-6) (both minimax). The error of Phi is below 1.5
/// ulp for x >= 0; Phi of NaN is NaN.
[[gnu::always_inline]] inline NormalDistribution<float> vector_normal(float x) {
  const float square = x * x, size = std::fabs(x), exponent = -0.5f * square;
  const float power = normal_exponential(exponent), bell = exponent < -87.33654f ? 0.0f : power;
  float y = 9.64023784e-05f;
  y = y * square + -0.00117245119f;
  y = y * square + 0.0099683851f;
  y = y * square + -0.0664896443f;
  y = y * square + 0.398942262f;
  const float near = y * x + 0.5f;
  const float t = size > 16.0f ? 16.0f : size;  // where bell is 0, the quotient must not be NaN
  const float over = (0.0571372658f * t + 0.261046052f) * t + 0.500205219f;
  const float under = ((0.142699882f * t + 0.663741887f) * t + 1.32221448f) * t + 1.0f;
  const float tail = bell * (over / under), far = x < 0 ? tail : 1.0f - tail;
  return {size < 0.9f ? near : (x == x ? far : x), bell};
}

}  // namespace tessera::ops
