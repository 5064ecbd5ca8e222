#include "gpu/elementwise.cuh"
#include "tensor/kernels.h"

/// Fill, copy and accumulate on a GPU: one read and one write an element, bound by memory.

namespace tessera {
namespace {

template <class T>
struct Fill {
  T value;
  __device__ T operator()() const { return value; }
};
template <class To, class From>
struct Convert {
  __device__ To operator()(From value) const { return convert<To>(value); }
};
template <class To, class From>
struct Accumulate {
  using Sum = std::conditional_t<std::is_same_v<To, double>, double, float>;
  __device__ To operator()(To y, From x) const { return To(Sum(y) + Sum(x)); }
};

}  // namespace

void fill_cuda(const Tensor& y, double value) {
  dispatch_any(y.dtype(), [&]<class T>() { gpu::elementwise<T>(y, Fill<T>{convert<T>(value)}); });
}

void copy_cuda(const Tensor& y, const Tensor& x) {
  dispatch_any(y.dtype(), [&]<class To>() {
    dispatch_any(x.dtype(), [&]<class From>() { gpu::elementwise<To, From>(y, Convert<To, From>{}, x); });
  });
}

void accumulate_cuda(const Tensor& y, const Tensor& x) {
  // f64 is summed alone, such as the partial sums of a gradient norm over ranks.
  if (y.dtype() == DType::f64 && x.dtype() == DType::f64)
    return gpu::elementwise<double, double, double>(y, Accumulate<double, double>{}, y, x);
  dispatch_floating_cuda(y.dtype(), "accumulate", [&]<class To>() {
    dispatch_floating_cuda(x.dtype(), "accumulate", [&]<class From>() {
      gpu::elementwise<To, To, From>(y, Accumulate<To, From>{}, y, x);
    });
  });
}

}  // namespace tessera
