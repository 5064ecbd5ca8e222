#include <tuple>
#include <type_traits>

#include "ops/elementwise.h"
#include "ops/pointwise/exp_log_internal.h"
#include "ops/pointwise/integers_math.h"
#include "ops/pointwise/pointwise_kernels.h"
#include "ops/pointwise/pointwise_math.h"

namespace tessera::ops {
namespace {

/// elementwise_cpu for operands of several element types.
template <class Out, class... In, class F, class... Inputs>
void mixed(const Tensor& y, F&& f, const Inputs&... x) {
  constexpr int N = 1 + int(sizeof...(Inputs));
  Out* const out = y.data<Out>();
  const std::tuple<const In*...> in{x.template data<In>()...};
  for_each_run<N>(make_loop(y.shape(), y, x...), [&](const auto& offsets, const auto& strides, int64_t n) {
    [&]<size_t... K>(std::index_sequence<K...>) {
      for (int64_t i = 0; i < n; ++i)
        out[offsets[0] + i * strides[0]] = f(std::get<K>(in)[offsets[K + 1] + i * strides[K + 1]]...);
    }
    (std::make_index_sequence<size_t(N - 1)>{});
  });
}

/// y in T, or wider: f32 from 16 bits.
template <class T, class F, class... Inputs>
void run(const Tensor& y, F&& f, const Inputs&... x) {
  if (y.dtype() == dtype_of<T>) return elementwise_cpu<T>(y, f, x...);
  mixed<Compute<T>, std::conditional_t<true, T, Inputs>...>(y, f, x...);
}

template <class T>
Numbers<Compute<T>> rounded(const Numbers<double>& numbers) {
  return {Compute<T>(numbers.a), Compute<T>(numbers.b)};
}

/// `apply` with functions that vectorise.
template <Unary kKind, class C>
C apply_on_cpu(C x, const Numbers<C>& numbers) {
  if constexpr (std::is_same_v<C, float> && kKind == Unary::exp) return full_exponential(x);
  if constexpr (std::is_same_v<C, float> && kKind == Unary::log) return full_logarithm(x);
  if constexpr (std::is_same_v<C, float> && kKind == Unary::softplus) {
    const C power = full_exponential(-std::abs(x)), sum = C(1) + power;
    // ln(1 + power): the logarithm of the rounded sum, and what rounding it lost.
    return (x > 0 ? x : C(0)) + (full_logarithm(sum) + (power - (sum - C(1))) / sum);
  }
  return apply<kKind>(x, numbers);
}

/// Cubes are frequent, and two products vectorise where pow of the C library takes elements one by one.
bool is_cube(Unary kind, const Numbers<double>& numbers) {
  return kind == Unary::pow && numbers.a == 3;
}

}  // namespace

void binary_cpu(const Tensor& y, const Tensor& a, const Tensor& b, Binary kind) {
  dispatch_floating(a.dtype(), name_of(kind), [&]<class T>() {
    dispatch_binary(kind, [&]<Binary kKind>() {
      run<T>(
          y, [](Compute<T> u, Compute<T> v) { return apply<kKind>(u, v); }, a, b);
    });
  });
}

void integer_binary_cpu(const Tensor& y, const Tensor& a, const Tensor& b, Binary kind) {
  dispatch_integers(a.dtype(), [&]<class T>() {
    dispatch_integer_binary(kind, [&]<Binary kKind>() {
      if constexpr (kOfIntegers<kKind, T>)
        mixed<T, T, T>(
            y, [](T u, T v) { return apply_to_integers<kKind>(u, v); }, a, b);
    });
  });
}

void integer_unary_cpu(const Tensor& y, const Tensor& x, Unary kind, Numbers<int64_t> numbers) {
  dispatch_index(x.dtype(), name_of(kind), [&]<class T>() {
    dispatch_unary(kind, [&]<Unary kKind>() {
      if constexpr (kOfInteger<kKind>)
        mixed<T, T>(
            y, [n = Numbers<T>{T(numbers.a), T(numbers.b)}](T v) { return apply_to_integer<kKind>(v, n); },
            x);
    });
  });
}

void operand_gradient_cpu(const Tensor& d, const Tensor& dy, const Tensor& mine, const Tensor& other,
                          Binary kind) {
  dispatch_floating(mine.dtype(), name_of(kind), [&]<class T>() {
    dispatch_binary(kind, [&]<Binary kKind>() {
      if constexpr (kHasOperandGradient<kKind>)
        run<T>(
            d, [](Compute<T> g, Compute<T> u, Compute<T> v) { return operand_gradient<kKind>(g, u, v); }, dy,
            mine, other);
    });
  });
}

void compare_cpu(const Tensor& y, const Tensor& a, const Tensor& b, Comparison kind) {
  dispatch_compared(a.dtype(), name_of(kind), [&]<class T>() {
    dispatch_comparison(kind, [&]<Comparison kKind>() {
      mixed<bool, T, T>(
          y, [](Compared<T> u, Compared<T> v) { return compare<kKind>(u, v); }, a, b);
    });
  });
}

void where_cpu(const Tensor& y, const Tensor& mask, const Tensor& a, const Tensor& b) {
  dispatch_among<double, float, bf16, f16, int64_t, int32_t, uint8_t, bool>(
      y.dtype(),
      [&]<class T>() {
        mixed<T, bool, T, T>(
            y, [](bool first, T u, T v) { return first ? u : v; }, mask, a, b);
      },
      [] {});
}

void unary_cpu(const Tensor& y, const Tensor& x, Unary kind, Numbers<double> numbers) {
  dispatch_floating(x.dtype(), name_of(kind), [&]<class T>() {
    if (is_cube(kind, numbers))
      return elementwise_cpu<T>(
          y, [](Compute<T> v) { return v * v * v; }, x);
    dispatch_unary(kind, [&]<Unary kKind>() {
      elementwise_cpu<T>(
          y, [n = rounded<T>(numbers)](Compute<T> v) { return apply_on_cpu<kKind>(v, n); }, x);
    });
  });
}

void unary_backward_cpu(const Tensor& dx, const Tensor& dy, const Tensor& kept, Unary kind,
                        Numbers<double> numbers) {
  dispatch_floating(kept.dtype(), name_of(kind), [&]<class T>() {
    if (is_cube(kind, numbers))
      return elementwise_cpu<T>(
          dx, [](Compute<T> g, Compute<T> v) { return g * (3 * (v * v)); }, dy, kept);
    dispatch_unary(kind, [&]<Unary kKind>() {
      if constexpr (kHasGradient<kKind>)
        elementwise_cpu<T>(
            dx,
            [n = rounded<T>(numbers)](Compute<T> g, Compute<T> v) { return unary_gradient<kKind>(g, v, n); },
            dy, kept);
    });
  });
}

}  // namespace tessera::ops
