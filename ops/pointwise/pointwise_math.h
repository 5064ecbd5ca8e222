#pragma once

#include <cmath>
#include <type_traits>
#include <utility>

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
  if constexpr (kKind == Binary::maximum) return a > b || a != a ? a : b;
  if constexpr (kKind == Binary::minimum) return a < b || a != a ? a : b;
}

/// Of the others the gradients are made of add, mul and div themselves.
template <Binary kKind>
inline constexpr bool kHasOperandGradient =
    kKind == Binary::div || kKind == Binary::maximum || kKind == Binary::minimum;

/// The gradient of the operand `mine`: of a quotient the divisor. That is divided twice: mine^2 could
/// overflow where the quotients do not.
template <Binary kKind, class C>
TESSERA_HD C operand_gradient(C dy, C mine, C other) {
  if constexpr (kKind == Binary::div) {
    return -dy * (other / mine / mine);
  } else {
    const bool loses = kKind == Binary::maximum ? mine < other : mine > other;
    return mine == other ? C(0.5) * dy : loses ? C(0) : dy;
  }
}

template <Comparison kKind, class C>
TESSERA_HD bool compare(C a, C b) {
  if constexpr (kKind == Comparison::less) return a < b;
  if constexpr (kKind == Comparison::less_equal) return a <= b;
  if constexpr (kKind == Comparison::greater) return a > b;
  if constexpr (kKind == Comparison::greater_equal) return a >= b;
  if constexpr (kKind == Comparison::equal) return a == b;
}

template <Unary kKind, class C>
TESSERA_HD C apply(C x, const Numbers<C>& numbers) {
  if constexpr (kKind == Unary::exp) return std::exp(x);
  if constexpr (kKind == Unary::log) return std::log(x);
  if constexpr (kKind == Unary::tanh) return hyperbolic_tangent(x);
  if constexpr (kKind == Unary::sigmoid) return logistic(x);
  if constexpr (kKind == Unary::sqrt) return std::sqrt(x);
  if constexpr (kKind == Unary::abs) return std::abs(x);
  if constexpr (kKind == Unary::square) return x * x;
  if constexpr (kKind == Unary::rsqrt) return C(1) / std::sqrt(x);
  if constexpr (kKind == Unary::sin) return std::sin(x);
  if constexpr (kKind == Unary::cos) return std::cos(x);
  // e^-|x| never overflows; a NaN comes through it.
  if constexpr (kKind == Unary::softplus) return (x > 0 ? x : C(0)) + std::log1p(std::exp(-std::abs(x)));
  if constexpr (kKind == Unary::scale) return numbers.a * x;
  if constexpr (kKind == Unary::shift) return x + numbers.a;
  if constexpr (kKind == Unary::reciprocal) return numbers.a / x;
  if constexpr (kKind == Unary::pow) return std::pow(x, numbers.a);
  if constexpr (kKind == Unary::clamp) return x < numbers.a ? numbers.a : x > numbers.b ? numbers.b : x;
}

/// Backward of the others is scale itself, or hands dy on.
template <Unary kKind>
inline constexpr bool kHasGradient = !(kKind == Unary::scale || kKind == Unary::shift);

/// dx from dy and what was kept: y where keeps_result() says so, x of the others.
template <Unary kKind, class C>
TESSERA_HD C unary_gradient(C dy, C kept, const Numbers<C>& numbers) {
  if constexpr (kKind == Unary::exp) return dy * kept;
  if constexpr (kKind == Unary::log) return dy / kept;
  if constexpr (kKind == Unary::tanh) return dy * (C(1) - kept * kept);
  if constexpr (kKind == Unary::sigmoid) return dy * (kept * (C(1) - kept));
  if constexpr (kKind == Unary::sqrt) return dy / (C(2) * kept);
  if constexpr (kKind == Unary::abs) return kept > 0 ? dy : kept < 0 ? -dy : C(0);
  if constexpr (kKind == Unary::square) return C(2) * dy * kept;
  if constexpr (kKind == Unary::rsqrt) return C(-0.5) * dy / std::sqrt(kept) / kept;
  if constexpr (kKind == Unary::sin) return dy * std::cos(kept);
  if constexpr (kKind == Unary::cos) return -dy * std::sin(kept);
  if constexpr (kKind == Unary::softplus) return dy * logistic(kept);
  if constexpr (kKind == Unary::reciprocal) return -dy * (numbers.a / kept / kept);
  if constexpr (kKind == Unary::pow)
    return numbers.a == 0 ? C(0) : dy * (numbers.a * std::pow(kept, numbers.a - C(1)));
  if constexpr (kKind == Unary::clamp) return kept > numbers.a && kept < numbers.b ? dy : C(0);
}

/// Calls `f.template operator()<kind>()` for a kind from the first of its enumeration to kLast.
template <auto kLast, class F>
void dispatch_kind(decltype(kLast) kind, F&& f) {
  using Kind = decltype(kLast);
  [&]<size_t... K>(std::index_sequence<K...>) {
    (void)((kind == Kind(K) && (f.template operator()<Kind(K)>(), true)) || ...);
  }
  (std::make_index_sequence<size_t(kLast) + 1>{});
}
template <class F>
void dispatch_binary(Binary kind, F&& f) {
  dispatch_kind<Binary::minimum>(kind, f);
}
template <class F>
void dispatch_comparison(Comparison kind, F&& f) {
  dispatch_kind<Comparison::equal>(kind, f);
}
template <class F>
void dispatch_unary(Unary kind, F&& f) {
  dispatch_kind<Unary::clamp>(kind, f);
}

/// What comparisons compare: integers as they are, 16-bit floats as f32.
template <class T>
using Compared = std::conditional_t<std::is_integral_v<T>, T, Compute<T>>;
template <class F>
void dispatch_compared(DType dtype, const char* what, F&& f) {
  dispatch_among<double, float, bf16, f16, int64_t, int32_t, bool>(dtype, f, [&] {
    fail_at(Site::here(), what, ": dtype ", dtype,
            " is not supported; expected f64, f32, bf16, f16, i64, i32 or bool");
  });
}
template <class F>
void dispatch_compared_cuda(DType dtype, const char* what, F&& f) {
  dispatch_among<float, bf16, f16, int64_t, int32_t, bool>(dtype, f, [&] {
    fail_at(Site::here(), what, ": dtype ", dtype,
            " is not supported on device cuda; expected f32, bf16, f16, i64, i32 or bool");
  });
}

}  // namespace tessera::ops
