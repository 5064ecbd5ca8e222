#include "ops/activation/activation_kernels.h"
#include "ops/activation/activation_math.h"
#include "ops/elementwise.h"

namespace tessera::ops {

void activation_forward_cpu(const Tensor& y, const Tensor& x, Activation kind) {
  dispatch_floating(x.dtype(), name_of(kind), [&]<class T>() {
    dispatch_activation(kind, [&]<Activation kKind>() {
      elementwise_cpu<T>(
          y, [](Compute<T> v) { return activate<kKind>(v); }, x);
    });
  });
}

void activation_backward_cpu(const Tensor& dx, const Tensor& dy, const Tensor& x, Activation kind) {
  dispatch_floating(x.dtype(), name_of(kind), [&]<class T>() {
    dispatch_activation(kind, [&]<Activation kKind>() {
      elementwise_cpu<T>(
          dx, [](Compute<T> g, Compute<T> v) { return g * activate_slope<kKind>(v); }, dy, x);
    });
  });
}

}  // namespace tessera::ops
