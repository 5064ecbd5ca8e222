#include "ops/elementwise.h"
#include "ops/mlp/mlp_sparse24_kernels.h"
#include "ops/mlp/mlp_sparse24_math.h"

namespace tessera::ops {

void slopes24_cpu(const Tensor& slopes, const Tensor& a, const Tensor& kept, const Selection24& selection,
                  Activation kind) {
  const float scale = selection.method == Method24::mvue ? 1 : selection.scale.item<float>();
  dispatch_floating(a.dtype(), "mlp_sparse24", [&]<class T>() {
    using C = Compute<T>;
    const auto run = [&]<Activation kKind>() {
      if (selection.method == Method24::mvue)
        elementwise_cpu<T>(
            slopes, [](C value, C own) { return drawn_slope24<kKind>(value, own); }, a, kept);
      else
        elementwise_cpu<T>(
            slopes, [&](C value, C own) { return soft_slope24<kKind>(value, own, C(scale)); }, a, kept);
    };
    if (kind == Activation::relu)
      run.template operator()<Activation::relu>();
    else
      run.template operator()<Activation::relu_squared>();
  });
}

void add_to_all_cpu(const Tensor& x, const Tensor& value, double factor) {
  dispatch_floating(x.dtype(), "mlp_sparse24", [&]<class T>() {
    using C = Compute<T>;
    const C added = C(factor) * *value.data<C>();
    elementwise_cpu<T>(
        x, [added](C own) { return own + added; }, x);
  });
}

}  // namespace tessera::ops
