#pragma once

#include <bit>

#include "tensor/dtype.h"

/// The decisions of a gate, the same on every device to the bit.

namespace tessera::ops {

TESSERA_HD float gate_value(float x, float scale) {
  return (x < 0 ? -x : x) * scale;
}
/// Kind::threshold
TESSERA_HD bool passes(float value, float threshold) {
  return !(value <= threshold);
}
/// The order of Kind::top_k: of values that are not negative, as their bits; NaN above all. A scale of 0 or
/// below puts its input last.
TESSERA_HD uint32_t gate_rank(float value) {
  if (value != value) return 0xFFFFFFFFu;
  return value > 0 ? std::bit_cast<uint32_t>(value) : 0u;
}

}  // namespace tessera::ops
