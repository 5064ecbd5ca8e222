#include <limits>
#include <type_traits>

#include "gpu/approx.cuh"
#include "gpu/elementwise.cuh"
#include "ops/pointwise/pointwise_kernels.h"
#include "ops/pointwise/pointwise_math.h"

/// One to three reads and one write an element, a handful of operations on each: bound by memory. The one
/// elementwise kernel does all of it; an operand that broadcasts is read from cache.

namespace tessera::ops {
namespace {

template <Binary kKind, class Out, class T>
struct Apply {
  __device__ Out operator()(T a, T b) const { return Out(apply<kKind>(float(a), float(b))); }
};
template <Binary kKind, class Out, class T>
struct OperandGradient {
  __device__ Out operator()(T dy, T mine, T other) const {
    return Out(operand_gradient<kKind>(float(dy), float(mine), float(other)));
  }
};
/// Both gradients, of a product as their products.
template <Binary kKind, class T>
struct BothGradients {
  __device__ gpu::Pair<T> operator()(T dy, T a, T b) const {
    const float g = float(dy), u = float(a), v = float(b);
    if constexpr (kKind == Binary::mul)
      return {T(g * v), T(g * u)};
    else if constexpr (kKind == Binary::div)
      return {T(g / v), T(operand_gradient<kKind>(g, v, u))};
    else
      return {T(operand_gradient<kKind>(g, u, v)), T(operand_gradient<kKind>(g, v, u))};
  }
};
template <Comparison kKind, class T>
struct Compare {
  __device__ bool operator()(T a, T b) const { return compare<kKind>(Compared<T>(a), Compared<T>(b)); }
};
template <class T>
struct Choose {
  __device__ T operator()(bool first, T a, T b) const { return first ? a : b; }
};
template <class T>
struct ChooseGradient {
  __device__ gpu::Pair<T> operator()(T dy, bool first) const {
    return {first ? dy : T(0.0f), first ? T(0.0f) : dy};
  }
};

/// x^a by the approximate instructions: within |a log2 x| 2^-22 of it, which does not show in 16 bits.
__device__ float short_pow(float x, float a) {
  if (a == 0) return 1;
  const float size = gpu::exp2_approx(a * __log2f(fabsf(x)));
  const bool whole = truncf(a) == a, odd = whole && fabsf(a) < 16777216.0f && (int(a) & 1) != 0;
  return !signbit(x)                   ? size
         : odd                         ? -size
         : whole || x == 0 || isinf(x) ? size
         : x != x                      ? x
                                       : std::numeric_limits<float>::quiet_NaN();
}

/// apply and unary_gradient with what a GPU has instructions for; kFast: for results of 16 bits.
template <Unary kKind, bool kFast>
__device__ float value_of(float x, const Numbers<float>& numbers) {
  if constexpr (kKind == Unary::rsqrt) return rsqrtf(x);
  if constexpr (kFast && kKind == Unary::sqrt) return gpu::sqrt_approx(x);
  if constexpr (kFast && kKind == Unary::sigmoid) return logistic<true>(x);
  if constexpr (kFast && kKind == Unary::pow) return short_pow(x, numbers.a);
  return apply<kKind>(x, numbers);
}
template <Unary kKind, bool kFast>
__device__ float slope_of(float dy, float kept, const Numbers<float>& numbers) {
  if constexpr (kKind == Unary::rsqrt) {
    const float root = rsqrtf(kept);
    return -0.5f * dy * root * (root * root);
  }
  if constexpr (kFast && kKind == Unary::sqrt) return quotient<true>(0.5f * dy, kept);
  if constexpr (kFast && kKind == Unary::softplus) return dy * logistic<true>(kept);
  if constexpr (kFast && kKind == Unary::pow)
    return numbers.a == 0 ? 0.0f : dy * (numbers.a * short_pow(kept, numbers.a - 1.0f));
  return unary_gradient<kKind>(dy, kept, numbers);
}

template <Unary kKind>
inline constexpr bool kCallsLibrary = kKind == Unary::sin || kKind == Unary::cos ||
                                      kKind == Unary::softplus || kKind == Unary::pow || kKind == Unary::log;
template <Unary kKind, class T>
struct ApplyOne {
  static constexpr bool kLong = kCallsLibrary<kKind>;
  Numbers<float> numbers;
  __device__ T operator()(T x) const { return T(value_of<kKind, sizeof(T) == 2>(float(x), numbers)); }
};
template <Unary kKind, class T>
struct Gradient {
  static constexpr bool kLong = kCallsLibrary<kKind>;
  Numbers<float> numbers;
  __device__ T operator()(T dy, T kept) const {
    return T(slope_of<kKind, sizeof(T) == 2>(float(dy), float(kept), numbers));
  }
};

Numbers<float> rounded(const Numbers<double>& numbers) {
  return {float(numbers.a), float(numbers.b)};
}

}  // namespace

void binary_cuda(const Tensor& y, const Tensor& a, const Tensor& b, Binary kind) {
  dispatch_floating_cuda(a.dtype(), name_of(kind), [&]<class T>() {
    dispatch_binary(kind, [&]<Binary kKind>() {
      if constexpr (kKind == Binary::mul || kKind == Binary::div) {
        if (y.dtype() != a.dtype()) return gpu::elementwise<float, T, T>(y, Apply<kKind, float, T>{}, a, b);
      }
      gpu::elementwise<T, T, T>(y, Apply<kKind, T, T>{}, a, b);
    });
  });
}

void operand_gradient_cuda(const Tensor& d, const Tensor& dy, const Tensor& mine, const Tensor& other,
                           Binary kind) {
  dispatch_floating_cuda(mine.dtype(), name_of(kind), [&]<class T>() {
    dispatch_binary(kind, [&]<Binary kKind>() {
      if constexpr (kHasOperandGradient<kKind>) {
        if (d.dtype() != mine.dtype())
          return gpu::elementwise<float, T, T, T>(d, OperandGradient<kKind, float, T>{}, dy, mine, other);
        gpu::elementwise<T, T, T, T>(d, OperandGradient<kKind, T, T>{}, dy, mine, other);
      }
    });
  });
}

bool both_gradients_cuda(const Tensor& da, const Tensor& db, const Tensor& dy, const Tensor& a,
                         const Tensor& b, Binary kind) {
  bool done = false;
  dispatch_floating_cuda(dy.dtype(), name_of(kind), [&]<class T>() {
    dispatch_binary(kind, [&]<Binary kKind>() {
      if constexpr (kKind == Binary::mul || kHasOperandGradient<kKind>)
        done = gpu::elementwise_pair<T, T, T, T>(da, db, BothGradients<kKind, T>{}, dy, a, b);
    });
  });
  return done;
}

bool both_gradients_cuda(const Tensor& da, const Tensor& db, const Tensor& dy, const Tensor& mask) {
  bool done = false;
  dispatch_floating_cuda(dy.dtype(), "where", [&]<class T>() {
    done = gpu::elementwise_pair<T, T, bool>(da, db, ChooseGradient<T>{}, dy, mask);
  });
  return done;
}

void compare_cuda(const Tensor& y, const Tensor& a, const Tensor& b, Comparison kind) {
  dispatch_compared_cuda(a.dtype(), name_of(kind), [&]<class T>() {
    dispatch_comparison(
        kind, [&]<Comparison kKind>() { gpu::elementwise<bool, T, T>(y, Compare<kKind, T>{}, a, b); });
  });
}

void where_cuda(const Tensor& y, const Tensor& mask, const Tensor& a, const Tensor& b) {
  dispatch_floating_cuda(y.dtype(), "where",
                         [&]<class T>() { gpu::elementwise<T, bool, T, T>(y, Choose<T>{}, mask, a, b); });
}

void unary_cuda(const Tensor& y, const Tensor& x, Unary kind, Numbers<double> numbers) {
  dispatch_floating_cuda(x.dtype(), name_of(kind), [&]<class T>() {
    dispatch_unary(
        kind, [&]<Unary kKind>() { gpu::elementwise<T, T>(y, ApplyOne<kKind, T>{rounded(numbers)}, x); });
  });
}

void unary_backward_cuda(const Tensor& dx, const Tensor& dy, const Tensor& kept, Unary kind,
                         Numbers<double> numbers) {
  dispatch_floating_cuda(kept.dtype(), name_of(kind), [&]<class T>() {
    dispatch_unary(kind, [&]<Unary kKind>() {
      if constexpr (kHasGradient<kKind>)
        gpu::elementwise<T, T, T>(dx, Gradient<kKind, T>{rounded(numbers)}, dy, kept);
    });
  });
}

}  // namespace tessera::ops
