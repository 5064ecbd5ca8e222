#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "runtime/philox.h"

/// The arithmetic of sampling, the same bits on the CPU and on a GPU: IEEE operations one by one and explicit
/// fma, so that no compiler may fuse or reorder anything. Included by sample.cpp and sample_cuda.cu.

namespace tessera::ops {

inline constexpr int kWeightBits = 40;

/// Where a logit stands among all: larger for a larger one, equal for equal ones (0 and -0 too).
TESSERA_HD uint32_t logit_rank(float logit) {
  logit += 0.0f;  // -0 becomes 0
  uint32_t bits;
  memcpy(&bits, &logit, sizeof bits);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
inline constexpr uint32_t kRankOfNothing = 0x007FFFFFu;  // of -inf

/// round(2^40 e^((logit - top) / temperature)) for logit <= top; infinite ones leave nothing to others.
TESSERA_HD uint64_t logit_weight(float logit, float top, double temperature) {
  if (logit == top) return uint64_t(1) << kWeightBits;  // +inf has no difference to itself
  const double x = (double(logit) - double(top)) / temperature;
  if (!(x > -30)) return 0;  // e^-30 < 2^-42
  constexpr double kLog2E = 0x1.71547652b82fep+0;
  constexpr double kLn2High = 0x1.62e42fefa39efp-1, kLn2Low = 0x1.abc9e3b39803fp-56;
  const double n = rint(x * kLog2E);
  double r = fma(-n, kLn2High, x);
  r = fma(-n, kLn2Low, r);
  // Taylor to r^10 for |r| <= 0.347: the next term is 2.2e-13 of the sum, half a unit of the result.
  constexpr double kTerms[] = {1.0 / 362880, 1.0 / 40320, 1.0 / 5040, 1.0 / 720, 1.0 / 120,
                               1.0 / 24,     1.0 / 6,     0.5,        1.0,       1.0};
  double sum = 1.0 / 3628800;
  for (const double term : kTerms) sum = fma(sum, r, term);
  const int64_t exponent = (int64_t(n) + kWeightBits + 1023) << 52;
  double scale;
  memcpy(&scale, &exponent, sizeof scale);
  return uint64_t(llrint(sum * scale));
}

/// 53 random bits of choice `index`.
TESSERA_HD uint64_t choice_bits(uint64_t seed, uint64_t sequence, uint64_t index) {
  const Uint4 random = philox(seed, sequence, index);
  return (uint64_t(random.word[0]) << 21) ^ (random.word[1] >> 11);
}

/// The place among `total` that the bits choose: floor(bits total / 2^53); total < 2^63.
TESSERA_HD uint64_t place_of(uint64_t bits, uint64_t total) {
  const uint64_t high = bits >> 32, low = bits & 0xFFFFFFFFu;
  const uint64_t total_high = total >> 32, total_low = total & 0xFFFFFFFFu;
  // 128 bits of product from four of 64: a carry is at most 2.
  const uint64_t a = low * total_low, b = low * total_high, c = high * total_low, d = high * total_high;
  const uint64_t middle = (a >> 32) + (b & 0xFFFFFFFFu) + (c & 0xFFFFFFFFu);
  const uint64_t lower = (a & 0xFFFFFFFFu) | middle << 32;
  const uint64_t upper = d + (b >> 32) + (c >> 32) + (middle >> 32);
  return upper << 11 | lower >> 53;
}

/// The least sum of kept weights that reaches top_p of `total`.
TESSERA_HD uint64_t needed_weight(double top_p, uint64_t total) {
  const double need = ceil(top_p * double(total));
  return need < double(total) ? uint64_t(need) : total;
}

}  // namespace tessera::ops
