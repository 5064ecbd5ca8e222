#pragma once

#include <bit>
#include <cstdint>
#include <limits>

#include "ops/vector_math_internal.h"

/// e^x and ln x of f32 over the whole range as plain arithmetic without branches, which vectorises where the
/// C library's functions are called one element at a time: a tenth of their time (AVX2). They need numbers
/// below 2^-126 not to be flushed to 0, as they are not by default.

namespace tessera::ops {

/// e^x to within 1.5 ulp, below 2^-126 too; infinity from 88.8 on, NaN for NaN. The power of 2 in two
/// factors, which reach what one f32 cannot.
inline float full_exponential(float x) {
  const auto [fraction, bits] =
      split_exponential(x < -104.0f ? -104.0f : (x > 89.0f ? 89.0f : x));  // 0 and infinity from there on
  const auto power = [](int32_t exponent) { return std::bit_cast<float>(uint32_t(exponent + 127) << 23); };
  const auto whole = int32_t(bits - std::bit_cast<uint32_t>(12582912.0f));
  const int32_t half = whole >> 1;
  return fraction * power(half) * power(whole - half);
}

/// ln x to within 1.5 ulp; -infinity for 0, NaN below. x = 2^n (1 + f) with 1 + f between sqrt(1/2) and
/// sqrt 2, and ln(1 + f) = f - f^2 / 2 + f^3 times a polynomial of degree 7 in f (minimax in the relative
/// error of the whole, 6e-9).
inline float full_logarithm(float x) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const bool tiny = x < std::numeric_limits<float>::min();
  const float scaled = tiny ? x * 8388608.0f : x;  // 2^23: with an exponent of its own
  const uint32_t root = std::bit_cast<uint32_t>(0.70710678f);
  const uint32_t above = std::bit_cast<uint32_t>(scaled) - root;
  const float n = float(int32_t(above) >> 23) - (tiny ? 23.0f : 0.0f);
  const float f = std::bit_cast<float>((above & 0x7FFFFFu) + root) - 1.0f, square = f * f;
  float y = -0.0763448179f;
  y = y * f + 0.127619609f;
  y = y * f - 0.131603658f;
  y = y * f + 0.142017201f;
  y = y * f - 0.166233361f;
  y = y * f + 0.200012282f;
  y = y * f - 0.250008225f;
  y = y * f + 0.333333313f;
  // ln 2 = 0.693359375 - 2.12194440e-4, whose first part times n is exact.
  const float result = (y * f * square - n * 2.12194440e-4f - 0.5f * square) + f + n * 0.693359375f;
  const float finite = x < kInfinity ? result : x;
  return x < 0 ? std::numeric_limits<float>::quiet_NaN() : (x == 0 ? -kInfinity : finite);
}

}  // namespace tessera::ops
