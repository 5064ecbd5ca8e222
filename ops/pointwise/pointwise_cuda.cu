#include <type_traits>

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
template <class Out, class T>
struct DivisorGradient {
  __device__ Out operator()(T dy, T a, T b) const {
    return Out(divisor_slope(float(dy), float(a), float(b)));
  }
};
template <class T>
struct Scale {
  float factor;
  __device__ T operator()(T x) const { return T(factor * float(x)); }
};
template <Unary kKind, class T>
struct ApplyOne {
  __device__ T operator()(T x) const { return T(apply<kKind>(float(x))); }
};
template <Unary kKind, class T>
struct Gradient {
  __device__ T operator()(T dy, T kept) const { return T(unary_gradient<kKind>(float(dy), float(kept))); }
};

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

void divisor_gradient_cuda(const Tensor& db, const Tensor& dy, const Tensor& a, const Tensor& b) {
  dispatch_floating_cuda(a.dtype(), "div", [&]<class T>() {
    if (db.dtype() != a.dtype())
      return gpu::elementwise<float, T, T, T>(db, DivisorGradient<float, T>{}, dy, a, b);
    gpu::elementwise<T, T, T, T>(db, DivisorGradient<T, T>{}, dy, a, b);
  });
}

void scale_cuda(const Tensor& y, const Tensor& x, double factor) {
  dispatch_floating_cuda(x.dtype(), "scale",
                         [&]<class T>() { gpu::elementwise<T, T>(y, Scale<T>{float(factor)}, x); });
}

void unary_cuda(const Tensor& y, const Tensor& x, Unary kind) {
  dispatch_floating_cuda(x.dtype(), name_of(kind), [&]<class T>() {
    dispatch_unary(kind, [&]<Unary kKind>() { gpu::elementwise<T, T>(y, ApplyOne<kKind, T>{}, x); });
  });
}

void unary_backward_cuda(const Tensor& dx, const Tensor& dy, const Tensor& kept, Unary kind) {
  dispatch_floating_cuda(kept.dtype(), name_of(kind), [&]<class T>() {
    dispatch_unary(kind,
                   [&]<Unary kKind>() { gpu::elementwise<T, T, T>(dx, Gradient<kKind, T>{}, dy, kept); });
  });
}

}  // namespace tessera::ops
