#pragma once

#include <cmath>

#include "runtime/parallel.h"
#include "runtime/rng.h"
#include "tensor/kernels.h"

namespace tessera::ops {

struct RandomFill {
  enum class Kind : uint8_t { uniform, normal, integer };
  Kind kind;
  RandomStream stream;
  float shift, scale;
  float most;  // of a uniform fill: rounding does not raise a number above it
  int64_t high;
};

/// Element `index` of the fill: one Philox block each.
template <class T>
TESSERA_HD T random_element(const RandomFill& fill, uint64_t index) {
  const Uint4 bits = philox(fill.stream.seed, fill.stream.offset(), index);
  if constexpr (std::is_integral_v<T>) {
    const uint64_t word = uint64_t(bits.word[0]) << 32 | bits.word[1];
    return T(word % uint64_t(fill.high));
  } else {
    if (fill.kind == RandomFill::Kind::uniform) {
      const float value = fill.shift + fill.scale * uniform_half_open(bits.word[0]);
      return convert<T>(value > fill.most ? fill.most : value);
    }
    const float radius = std::sqrt(-2.0f * std::log(uniform_open(bits.word[0])));
    const float angle = 6.28318530717958647692f * uniform_half_open(bits.word[1]);
    return convert<T>(fill.shift + fill.scale * radius * std::cos(angle));
  }
}

void random_fill_cpu(const Tensor& tensor, const RandomFill& fill);
void random_fill_cuda(const Tensor& tensor, const RandomFill& fill);

/// order = the places of the keys, which are not negative, in ascending order of these; of equal ones the
/// first place first. Both i64 [n], packed, n >= 1.
void order_of_keys_cpu(const Tensor& order, const Tensor& keys);
void order_of_keys_cuda(const Tensor& order, const Tensor& keys);

}  // namespace tessera::ops
