#pragma once

#include <type_traits>

#include "ops/pointwise/pointwise_kernels.h"

/// The pointwise operators of whole numbers, for both devices: sums, differences and products modulo 2^64 or
/// 2^32; quotients rounded down. Of bools the larger and the smaller one alone.

namespace tessera::ops {

template <class T>
using Wrapping = std::make_unsigned_t<std::conditional_t<std::is_same_v<T, bool>, int32_t, T>>;

template <Binary kKind, class T>
inline constexpr bool kOfIntegers = kKind == Binary::maximum || kKind == Binary::minimum ||
                                    (kKind != Binary::div && !std::is_same_v<T, bool>);

template <Binary kKind, class T>
TESSERA_HD T apply_to_integers(T a, T b) {
  using U = Wrapping<T>;
  if constexpr (kKind == Binary::add) return T(U(a) + U(b));
  if constexpr (kKind == Binary::sub) return T(U(a) - U(b));
  if constexpr (kKind == Binary::mul) return T(U(a) * U(b));
  if constexpr (kKind == Binary::maximum) return a > b ? a : b;
  if constexpr (kKind == Binary::minimum) return a < b ? a : b;
  // By 0 all bits are set; by -1 the quotient wraps around, which C++ would not define.
  if constexpr (kKind == Binary::floor_div) {
    if (b == 0) return T(-1);
    if (b == -1) return T(U(0) - U(a));
    return T(a / b - (a % b != 0 && (a < 0) != (b < 0)));
  }
  if constexpr (kKind == Binary::remainder) {
    if (b == 0) return T(-1);
    if (b == -1) return T(0);
    const T rest = T(a % b);
    return rest != 0 && (rest < 0) != (b < 0) ? T(rest + b) : rest;
  }
}

template <Unary kKind>
inline constexpr bool kOfInteger = kKind == Unary::scale || kKind == Unary::shift || kKind == Unary::abs ||
                                   kKind == Unary::square || kKind == Unary::clamp;

template <Unary kKind, class T>
TESSERA_HD T apply_to_integer(T x, const Numbers<T>& numbers) {
  using U = Wrapping<T>;
  if constexpr (kKind == Unary::scale) return T(U(numbers.a) * U(x));
  if constexpr (kKind == Unary::shift) return T(U(x) + U(numbers.a));
  if constexpr (kKind == Unary::abs) return x < 0 ? T(U(0) - U(x)) : x;
  if constexpr (kKind == Unary::square) return T(U(x) * U(x));
  if constexpr (kKind == Unary::clamp) return x < numbers.a ? numbers.a : x > numbers.b ? numbers.b : x;
}

/// As dispatch_binary, for these operators.
template <class F>
void dispatch_integer_binary(Binary kind, F&& f) {
  dispatch_kind<Binary::remainder>(kind, f);
}

/// Calls `f.template operator()<T>()` for i64, i32 or bool.
template <class F>
void dispatch_integers(DType dtype, F&& f) {
  dispatch_among<int64_t, int32_t, bool>(dtype, f, [] {});
}

}  // namespace tessera::ops
