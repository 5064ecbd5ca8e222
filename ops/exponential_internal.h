#pragma once

#include <bit>
#include <cstdint>
#include <limits>

namespace tessera::ops {

/// e^x to within 1.5 ulp as plain arithmetic, which vectorises where std::exp does not. 0 below -86.9,
/// infinity above 88.7, NaN for NaN. Cody and Waite's reduction x = n ln 2 + r, and a polynomial of degree 6
/// in r.
inline float vector_exponential(float x) {
  const float clamped = x < -86.9f ? -86.9f : (x > 88.7f ? 88.7f : x);
  const float shifted = clamped * 1.44269504f + 12582912.0f;  // 1.5 * 2^23: the sum's low bits are n
  const float n = shifted - 12582912.0f;
  const float r = (clamped - n * 0.693359375f) + n * 2.12194440e-4f;
  float y = 1.9875691500e-4f;
  y = y * r + 1.3981999507e-3f;
  y = y * r + 8.3334519073e-3f;
  y = y * r + 4.1665795894e-2f;
  y = y * r + 1.6666665459e-1f;
  y = y * r + 5.0000001201e-1f;
  y = y * r * r + r + 1.0f;
  // 2^(n - 1) * 2, as 2^128 has no bits of its own.
  const float power = std::bit_cast<float>((std::bit_cast<uint32_t>(shifted) + 126u) << 23);
  const float result = y * power * 2.0f;
  const float bounded = x < -86.9f ? 0.0f : (x > 88.7f ? std::numeric_limits<float>::infinity() : result);
  return x == x ? bounded : x;
}

}  // namespace tessera::ops
