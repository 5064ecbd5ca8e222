#pragma once

#include <bit>
#include <cstdint>

#include "runtime/philox.h"
#include "tensor/dtype.h"

/// Stochastic rounding (Gupta, Agrawal, Gopalakrishnan, Narayanan: "Deep learning with limited numerical
/// precision", ICML 2015, section 3.1): up or down with the probabilities that make the mean exact, so that
/// changes smaller than the distance of two numbers count on average. Zamirai, Zhang, Aberger, De Sa
/// ("Revisiting bfloat16 training", arXiv:2010.06192) train bf16 weights without f32 copies in this way.

namespace tessera::optim {

/// Rounds with 16 random bits: they are added below the last bit that bf16 keeps, and what is below is cut
/// off. bf16 numbers and infinities, whose lower half is zero, stay what they are, and NaN stays a NaN.
TESSERA_HD bf16 round_stochastically(float value, uint32_t random) {
  const uint32_t sum = std::bit_cast<uint32_t>(value) + (random & 0xFFFFu);
  bf16 rounded;
  rounded.bits = uint16_t((value == value ? sum : 0x7FFF'0000u) >> 16);
  return rounded;
}

/// The random bits of a step's elements: a function of seed, step and the element's place in the arenas, the
/// same on every device and for any division of the work.
struct RoundingBits {
  uint64_t seed = 0, step = 0;

  /// Those of elements 4 block ... 4 block + 3: a word each, whose lower half is for the weight and whose
  /// upper half is for the slow state.
  TESSERA_HD Uint4 of_block(int64_t block) const { return philox(seed, step, uint64_t(block)); }
};

}  // namespace tessera::optim
