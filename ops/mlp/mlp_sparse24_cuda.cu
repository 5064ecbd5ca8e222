#include "gpu/elementwise.cuh"
#include "ops/mlp/mlp_sparse24_kernels.h"
#include "ops/mlp/mlp_sparse24_math.h"

/// slopes24: two reads and one write per element, bound by memory; only the methods that change values need
/// it. add_to_all: one read and one write per element.

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
template <class T>
struct AddToAll {
  const float* value;
  float factor;
  __device__ T operator()(T x) const { return T(float(x) + factor * *value); }
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

void add_to_all_cuda(const Tensor& x, const Tensor& value, double factor) {
  dispatch_floating_cuda(x.dtype(), "mlp_sparse24", [&]<class T>() {
    gpu::elementwise<T, T>(x, AddToAll<T>{value.data<float>(), float(factor)}, x);
  });
}

}  // namespace tessera::ops
