#pragma once

#include <cmath>
#include <type_traits>

#include "ops/activation/activation.h"
#include "ops/vector_math_internal.h"

/// The activations as functions of one number, for every kernel that applies one (here, and in the GEMMs'
/// epilogues).

namespace tessera::ops {

/// Whether functions of C are those of ops/vector_math_internal.h, in which exp is cheap and tanh is not.
#if defined(__CUDA_ARCH__)
template <class C>
inline constexpr bool kVectorises = false;
#else
template <class C>
inline constexpr bool kVectorises = std::is_same_v<C, float>;
#endif

/// exp(x) and a / b. `kFast`, on a GPU: by the approximate instructions, whose error of a few ulp of f32 does
/// not show in a result that is rounded to 16 bits; they take a quarter of the time. On the CPU f32 uses
/// arithmetic that vectorises (1.5 ulp): a fifth of the time of std::exp.
template <bool kFast, class C>
TESSERA_HD C exponential(C x) {
#if defined(__CUDA_ARCH__)
  if constexpr (kFast) return __expf(x);
#else
  if constexpr (std::is_same_v<C, float>) return vector_exponential(x);
#endif
  return std::exp(x);
}
/// tanh; on the CPU that of f32 vectorises (2 ulp): a ninth of the time of the C library's.
template <class C>
TESSERA_HD C hyperbolic_tangent(C x) {
#if !defined(__CUDA_ARCH__)
  if constexpr (std::is_same_v<C, float>) return vector_tanh(x);
#endif
  return std::tanh(x);
}
template <bool kFast, class C>
TESSERA_HD C quotient(C a, C b) {
#if defined(__CUDA_ARCH__)
  if constexpr (kFast) return __fdividef(a, b);
#endif
  return a / b;
}

/// 1 / (1 + exp(-x)) without overflow: exp of a negative number only where x < 0 would overflow exp(-x) to
/// infinity, the quotient is 0, as it should be.
template <bool kFast = false, class C>
TESSERA_HD C logistic(C x) {
  return quotient<kFast>(C(1), C(1) + exponential<kFast>(-x));
}

/// Phi(x) and exp(-x^2 / 2) of the standard normal distribution.
template <bool kFast, class C>
TESSERA_HD NormalDistribution<C> normal_distribution(C x) {
#if !defined(__CUDA_ARCH__)
  if constexpr (std::is_same_v<C, float>) return vector_normal(x);
#endif
  return {C(0.5) * (C(1) + std::erf(x * C(0.70710678118654752440))), exponential<kFast>(C(-0.5) * x * x)};
}

template <Activation kKind, bool kFast = false, class C>
TESSERA_HD C activate(C x) {
  if constexpr (kKind == Activation::relu) return x > 0 ? x : (x != x ? x : C(0));
  if constexpr (kKind == Activation::relu_squared) return x > 0 ? x * x : (x != x ? x : C(0));
  if constexpr (kKind == Activation::silu) return x * logistic<kFast>(x);
  if constexpr (kKind == Activation::gelu) return x * normal_distribution<kFast>(x).cdf;
  if constexpr (kKind == Activation::gelu_tanh) {
    const C inner = C(0.79788456080286535588) * (x + C(0.044715) * x * x * x);
    if constexpr (kFast || kVectorises<C>)
      return x * logistic<kFast>(C(2) * inner);  // (1 + tanh u) / 2 = logistic(2 u)
    return C(0.5) * x * (C(1) + hyperbolic_tangent(inner));
  }
  if constexpr (kKind == Activation::none) return x;
}

/// f'(x). Of relu at NaN: 1, as in PyTorch.
template <Activation kKind, bool kFast = false, class C>
TESSERA_HD C activate_slope(C x) {
  if constexpr (kKind == Activation::relu) return x <= 0 ? C(0) : C(1);
  if constexpr (kKind == Activation::relu_squared) return x <= 0 ? C(0) : 2 * x;
  if constexpr (kKind == Activation::silu) {
    const C s = logistic<kFast>(x);
    return s * (C(1) + x * (C(1) - s));
  }
  if constexpr (kKind == Activation::gelu) {
    const auto [cdf, bell] = normal_distribution<kFast>(x);
    return cdf + x * C(0.39894228040143267794) * bell;
  }
  if constexpr (kKind == Activation::gelu_tanh) {
    const C a = C(0.79788456080286535588), b = C(0.044715);
    // What goes to 0 meets x first: x squared would be infinite from 2e19 on in f32, and 0 times that NaN.
    if constexpr (kFast || kVectorises<C>) {
      const C s = logistic<kFast>(C(2) * a * (x + b * x * x * x)), bell = C(2) * a * s * (C(1) - s) * x;
      return s + (bell + 3 * b * (bell * x) * x);
    }
    const C t = hyperbolic_tangent(a * (x + b * x * x * x)), bell = C(0.5) * a * (C(1) - t * t) * x;
    return C(0.5) * (C(1) + t) + (bell + 3 * b * (bell * x) * x);
  }
  if constexpr (kKind == Activation::none) return C(1);
}

/// Calls `f.template operator()<kind>()`.
template <class F>
decltype(auto) dispatch_activation(Activation kind, F&& f) {
  switch (kind) {
    case Activation::relu:
      return f.template operator()<Activation::relu>();
    case Activation::relu_squared:
      return f.template operator()<Activation::relu_squared>();
    case Activation::silu:
      return f.template operator()<Activation::silu>();
    case Activation::gelu:
      return f.template operator()<Activation::gelu>();
    case Activation::gelu_tanh:
      return f.template operator()<Activation::gelu_tanh>();
    default:
      return f.template operator()<Activation::none>();
  }
}

}  // namespace tessera::ops
