#include "gpu/elementwise.cuh"
#include "ops/swiglu/swiglu_kernels.h"
#include "ops/swiglu/swiglu_math.h"

/// Bound by memory. Forward reads two elements and writes one. Backward reads three and writes two in one
/// kernel where gpu::elementwise_pair takes the operands; other layouts take an element-wise pass for each
/// gradient, five reads and two writes. The library's exponential and IEEE division would take longer than
/// the memory does, so 16-bit dtypes use the approximate instructions, as the activations do.

namespace tessera::ops {
namespace {

template <class T>
inline constexpr bool kFast = sizeof(T) == 2;

template <class T>
struct Forward {
  __device__ T operator()(T gate, T up) const { return T(swiglu_value<kFast<T>>(float(gate), float(up))); }
};
template <class T>
struct Dgate {
  __device__ T operator()(T dy, T gate, T up) const {
    return T(swiglu_dgate<kFast<T>>(float(dy), float(gate), float(up)));
  }
};
template <class T>
struct Dup {
  __device__ T operator()(T dy, T gate) const { return T(swiglu_dup<kFast<T>>(float(dy), float(gate))); }
};

template <class T>
struct Backward {
  __device__ gpu::Pair<T> operator()(T dy, T gate, T up) const {
    return {Dgate<T>{}(dy, gate, up), Dup<T>{}(dy, gate)};
  }
};

}  // namespace

void swiglu_forward_cuda(const Tensor& y, const Tensor& gate, const Tensor& up) {
  dispatch_floating_cuda(y.dtype(), "swiglu",
                         [&]<class T>() { gpu::elementwise<T, T, T>(y, Forward<T>{}, gate, up); });
}

void swiglu_backward_cuda(const Tensor& dgate, const Tensor& dup, const Tensor& dy, const Tensor& gate,
                          const Tensor& up) {
  dispatch_floating_cuda(dy.dtype(), "swiglu", [&]<class T>() {
    if (dgate.defined() && dup.defined() &&
        gpu::elementwise_pair<T, T, T, T>(dgate, dup, Backward<T>{}, dy, gate, up))
      return;
    if (dgate.defined()) gpu::elementwise<T, T, T, T>(dgate, Dgate<T>{}, dy, gate, up);
    if (dup.defined()) gpu::elementwise<T, T, T>(dup, Dup<T>{}, dy, gate);
  });
}

}  // namespace tessera::ops
