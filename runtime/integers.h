#pragma once

#include <concepts>
#include <type_traits>

namespace tessera {

/// a / b rounded up; a not negative, b positive.
template <std::integral A, std::integral B>
constexpr std::common_type_t<A, B> ceil_div(A a, B b) {
  using Common = std::common_type_t<A, B>;
  return (Common(a) + Common(b) - 1) / Common(b);
}

/// a rounded up to a multiple of `unit`; a not negative, unit positive.
template <std::integral A, std::integral B>
constexpr std::common_type_t<A, B> round_up(A a, B unit) {
  return ceil_div(a, unit) * unit;
}

}  // namespace tessera
