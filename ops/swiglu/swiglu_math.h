#pragma once

#include "ops/activation/activation_math.h"

/// The formulas of one element, for both devices; `kFast` as in activation_math.h.

namespace tessera::ops {

template <bool kFast = false, class C>
TESSERA_HD C swiglu_value(C gate, C up) {
  return activate<Activation::silu, kFast>(gate) * up;
}

template <bool kFast = false, class C>
TESSERA_HD C swiglu_dgate(C dy, C gate, C up) {
  return dy * up * activate_slope<Activation::silu, kFast>(gate);
}

template <bool kFast = false, class C>
TESSERA_HD C swiglu_dup(C dy, C gate) {
  return dy * activate<Activation::silu, kFast>(gate);
}

}  // namespace tessera::ops
