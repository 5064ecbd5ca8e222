#pragma once

#include "ops/activation/activation_math.h"

/// The formulas of one element, for both devices.

namespace tessera::ops {

template <class C>
TESSERA_HD C swiglu_value(C gate, C up) {
  return activate<Activation::silu>(gate) * up;
}

template <class C>
TESSERA_HD C swiglu_dgate(C dy, C gate, C up) {
  return dy * up * activate_slope<Activation::silu>(gate);
}

template <class C>
TESSERA_HD C swiglu_dup(C dy, C gate) {
  return dy * activate<Activation::silu>(gate);
}

}  // namespace tessera::ops
