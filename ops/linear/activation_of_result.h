#pragma once

#include <cmath>

#include "ops/activation/activation.h"
#include "tensor/dtype.h"

namespace tessera::ops {

/// f'(h) by y = f(h), for relu and relu_squared: a NaN stays one.
template <Activation kKind, class C>
TESSERA_HD C slope_of_result(C y) {
  if constexpr (kKind == Activation::relu) return y == 0 ? C(0) : C(1);
  if constexpr (kKind == Activation::relu_squared) return 2 * std::sqrt(y);
  return C(1);
}

}  // namespace tessera::ops
