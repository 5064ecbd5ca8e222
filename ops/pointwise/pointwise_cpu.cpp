#include <type_traits>

#include "ops/pointwise/exp_log_internal.h"
#include "ops/pointwise/pointwise_kernels.h"
#include "ops/pointwise/pointwise_math.h"
#include "tensor/elementwise.h"

namespace tessera::ops {
namespace {

/// elementwise_cpu for an output that is wider than its inputs: f32 from 16 bits.
template <class T, class F, class... Inputs>
void widening(const Tensor& y, F&& f, const Inputs&... x) {
  constexpr int N = 1 + int(sizeof...(Inputs));
  using Out = Compute<T>;
  Out* const out = y.data<Out>();
  const std::array<const T*, N - 1> in{x.template data<T>()...};
  for_each_run<N>(make_loop(y.shape(), y, x...), [&](const auto& offsets, const auto& strides, int64_t n) {
    [&]<size_t... K>(std::index_sequence<K...>) {
      for (int64_t i = 0; i < n; ++i)
        out[offsets[0] + i * strides[0]] = f(Out(in[K][offsets[K + 1] + i * strides[K + 1]])...);
    }
    (std::make_index_sequence<size_t(N - 1)>{});
  });
}

template <class T, class F, class... Inputs>
void run(const Tensor& y, F&& f, const Inputs&... x) {
  if (y.dtype() == dtype_of<T>) return elementwise_cpu<T>(y, f, x...);
  widening<T>(y, f, x...);
}

/// `apply` with functions that vectorise.
template <Unary kKind, class C>
C apply_on_cpu(C x) {
  if constexpr (std::is_same_v<C, float> && kKind == Unary::exp) return full_exponential(x);
  if constexpr (std::is_same_v<C, float> && kKind == Unary::log) return full_logarithm(x);
  return apply<kKind>(x);
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

void divisor_gradient_cpu(const Tensor& db, const Tensor& dy, const Tensor& a, const Tensor& b) {
  dispatch_floating(a.dtype(), "div", [&]<class T>() {
    run<T>(
        db, [](Compute<T> g, Compute<T> u, Compute<T> v) { return divisor_slope(g, u, v); }, dy, a, b);
  });
}

void scale_cpu(const Tensor& y, const Tensor& x, double factor) {
  dispatch_floating(x.dtype(), "scale", [&]<class T>() {
    elementwise_cpu<T>(
        y, [by = Compute<T>(factor)](Compute<T> v) { return by * v; }, x);
  });
}

void unary_cpu(const Tensor& y, const Tensor& x, Unary kind) {
  dispatch_floating(x.dtype(), name_of(kind), [&]<class T>() {
    dispatch_unary(kind, [&]<Unary kKind>() {
      elementwise_cpu<T>(
          y, [](Compute<T> v) { return apply_on_cpu<kKind>(v); }, x);
    });
  });
}

void unary_backward_cpu(const Tensor& dx, const Tensor& dy, const Tensor& kept, Unary kind) {
  dispatch_floating(kept.dtype(), name_of(kind), [&]<class T>() {
    dispatch_unary(kind, [&]<Unary kKind>() {
      elementwise_cpu<T>(
          dx, [](Compute<T> g, Compute<T> v) { return unary_gradient<kKind>(g, v); }, dy, kept);
    });
  });
}

}  // namespace tessera::ops
