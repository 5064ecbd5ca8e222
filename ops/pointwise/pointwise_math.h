#pragma once

#include <cmath>

#include "ops/activation/activation_math.h"
#include "ops/pointwise/pointwise_kernels.h"

/// The pointwise operators as functions of numbers, for both devices.

namespace tessera::ops {

template <Binary kKind, class C>
TESSERA_HD C apply(C a, C b) {
  if constexpr (kKind == Binary::add) return a + b;
  if constexpr (kKind == Binary::sub) return a - b;
  if constexpr (kKind == Binary::mul) return a * b;
  if constexpr (kKind == Binary::div) return a / b;
}

/// The gradient of b in a / b. Divided twice: b^2 could overflow where the quotients do not.
template <class C>
TESSERA_HD C divisor_slope(C dy, C a, C b) {
  return -dy * (a / b / b);
}

template <Unary kKind, class C>
TESSERA_HD C apply(C x) {
  if constexpr (kKind == Unary::exp) return std::exp(x);
  if constexpr (kKind == Unary::log) return std::log(x);
  if constexpr (kKind == Unary::tanh) return hyperbolic_tangent(x);
  if constexpr (kKind == Unary::sigmoid) return logistic(x);
  if constexpr (kKind == Unary::sqrt) return std::sqrt(x);
}

/// dx from dy and what was kept: x of a logarithm, y of the others.
template <Unary kKind, class C>
TESSERA_HD C unary_gradient(C dy, C kept) {
  if constexpr (kKind == Unary::exp) return dy * kept;
  if constexpr (kKind == Unary::log) return dy / kept;
  if constexpr (kKind == Unary::tanh) return dy * (C(1) - kept * kept);
  if constexpr (kKind == Unary::sigmoid) return dy * (kept * (C(1) - kept));
  if constexpr (kKind == Unary::sqrt) return dy / (C(2) * kept);
}

/// Calls `f.template operator()<kind>()`.
template <class F>
decltype(auto) dispatch_binary(Binary kind, F&& f) {
  switch (kind) {
    case Binary::add:
      return f.template operator()<Binary::add>();
    case Binary::sub:
      return f.template operator()<Binary::sub>();
    case Binary::mul:
      return f.template operator()<Binary::mul>();
    default:
      return f.template operator()<Binary::div>();
  }
}
template <class F>
decltype(auto) dispatch_unary(Unary kind, F&& f) {
  switch (kind) {
    case Unary::exp:
      return f.template operator()<Unary::exp>();
    case Unary::log:
      return f.template operator()<Unary::log>();
    case Unary::tanh:
      return f.template operator()<Unary::tanh>();
    case Unary::sigmoid:
      return f.template operator()<Unary::sigmoid>();
    default:
      return f.template operator()<Unary::sqrt>();
  }
}

}  // namespace tessera::ops
