#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

/// Functions of f32 as plain arithmetic without branches, which vectorises where those of the C library do
/// not.

namespace tessera::ops {

/// e^x = 2^n fraction: Cody and Waite's reduction x = n ln 2 + r, and a polynomial of degree 6 in r. `bits`:
/// those of 1.5 * 2^23 + n, whose low ones are n.
struct SplitExponential {
  float fraction;
  uint32_t bits;
};
[[gnu::always_inline]] inline SplitExponential split_exponential(float x) {
  const float shifted = x * 1.44269504f + 12582912.0f;
  const float n = shifted - 12582912.0f;
  const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  float y = 1.9875691500e-4f;
  y = y * r + 1.3981999507e-3f;
  y = y * r + 8.3334519073e-3f;
  y = y * r + 4.1665795894e-2f;
  y = y * r + 1.6666665459e-1f;
  y = y * r + 5.0000001201e-1f;
  return {y * r * r + r + 1.0f, std::bit_cast<uint32_t>(shifted)};
}

/// e^x to within 1.5 ulp. 0 below -86.9, infinity above 88.7, NaN for NaN.
inline float vector_exponential(float x) {
  const auto [fraction, bits] = split_exponential(x < -86.9f ? -86.9f : (x > 88.7f ? 88.7f : x));
  // 2^(n - 1) * 2, as 2^128 has no bits of its own.
  const float result = fraction * std::bit_cast<float>((bits + 126u) << 23) * 2.0f;
  const float bounded = x < -86.9f ? 0.0f : (x > 88.7f ? std::numeric_limits<float>::infinity() : result);
  return x == x ? bounded : x;
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

/// erf x to within 2 ulp; NaN for NaN. Near 0 x times a polynomial in x^2, else 1 - e^-g, where g is a
/// polynomial of degree 6 for -ln erfc |x| (both minimax in the relative error of erf).
inline float vector_error_function(float x) {
  const float square = x * x, size = std::fabs(x);
  float y = -0.00059994f;
  y = y * square + 0.00499482919f;
  y = y * square - 0.0267677195f;
  y = y * square + 0.112818457f;
  y = y * square - 0.376124978f;
  y = y * square + 0.128379151f;
  const float near = y * x + x;
  const float t = size > 4.0f ? 4.0f : size;
  float g = -0.00019593954f;
  g = g * t + 0.0030432385f;
  g = g * t - 0.022226999f;
  g = g * t + 0.10393175f;
  g = g * t + 0.63718206f;
  g = g * t + 1.12767577f;
  g = g * t + 0.000195655185f;
  const float far = 1.0f - vector_exponential(-g);
  return size < 0.92f ? near : (x == x ? std::copysign(far, x) : x);
}

}  // namespace tessera::ops
