#include "ops/elementwise.h"
#include "ops/swiglu/swiglu_kernels.h"
#include "ops/swiglu/swiglu_math.h"

namespace tessera::ops {

void swiglu_forward_cpu(const Tensor& y, const Tensor& gate, const Tensor& up) {
  dispatch_floating(y.dtype(), "swiglu", [&]<class T>() {
    elementwise_cpu<T>(
        y, [](Compute<T> g, Compute<T> u) { return swiglu_value(g, u); }, gate, up);
  });
}

void swiglu_backward_cpu(const Tensor& dgate, const Tensor& dup, const Tensor& dy, const Tensor& gate,
                         const Tensor& up) {
  dispatch_floating(dy.dtype(), "swiglu", [&]<class T>() {
    using C = Compute<T>;
    if (dgate.defined())
      elementwise_cpu<T>(
          dgate, [](C d, C g, C u) { return swiglu_dgate(d, g, u); }, dy, gate, up);
    if (dup.defined())
      elementwise_cpu<T>(
          dup, [](C d, C g) { return swiglu_dup(d, g); }, dy, gate);
  });
}

}  // namespace tessera::ops
