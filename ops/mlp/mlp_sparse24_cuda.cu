#include "gpu/elementwise.cuh"
#include "ops/mlp/mlp_sparse24_kernels.h"
#include "ops/mlp/mlp_sparse24_math.h"

/// Two reads and one write per element: bound by memory. Only the methods that change values need it.

namespace tessera::ops {
namespace {

template <Activation kKind, class T>
struct DrawnSlope {
  __device__ T operator()(T a, T kept) const { return T(drawn_slope24<kKind>(float(a), float(kept))); }
};
template <Activation kKind, class T>
struct SoftSlope {
  const float* scale;
  __device__ T operator()(T a, T kept) const { return T(soft_slope24<kKind>(float(a), float(kept), *scale)); }
};

}  // namespace

void slopes24_cuda(const Tensor& slopes, const Tensor& a, const Tensor& kept, const Selection24& selection,
                   Activation kind) {
  dispatch_floating_cuda(a.dtype(), "mlp_sparse24", [&]<class T>() {
    const auto run = [&]<Activation kKind>() {
      if (selection.method == Method24::mvue)
        gpu::elementwise<T, T, T>(slopes, DrawnSlope<kKind, T>{}, a, kept);
      else
        gpu::elementwise<T, T, T>(slopes, SoftSlope<kKind, T>{selection.scale.data<float>()}, a, kept);
    };
    if (kind == Activation::relu)
      run.template operator()<Activation::relu>();
    else
      run.template operator()<Activation::relu_squared>();
  });
}

}  // namespace tessera::ops
