#include "gpu/elementwise.cuh"
#include "ops/swiglu/swiglu_kernels.h"
#include "ops/swiglu/swiglu_math.h"

/// Two reads and one write an element forward. Backward writes two gradients, each in a pass of its own: five
/// reads and two writes, where one pass would read three; of the two, the second finds gate and dy in L2
/// while they fit. Bound by memory.

namespace tessera::ops {
namespace {

template <class T>
struct Forward {
  __device__ T operator()(T gate, T up) const { return T(swiglu_value(float(gate), float(up))); }
};
template <class T>
struct Dgate {
  __device__ T operator()(T dy, T gate, T up) const {
    return T(swiglu_dgate(float(dy), float(gate), float(up)));
  }
};
template <class T>
struct Dup {
  __device__ T operator()(T dy, T gate) const { return T(swiglu_dup(float(dy), float(gate))); }
};

}  // namespace

void swiglu_forward_cuda(const Tensor& y, const Tensor& gate, const Tensor& up) {
  dispatch_floating_cuda(y.dtype(), "swiglu",
                         [&]<class T>() { gpu::elementwise<T, T, T>(y, Forward<T>{}, gate, up); });
}

void swiglu_backward_cuda(const Tensor& dgate, const Tensor& dup, const Tensor& dy, const Tensor& gate,
                          const Tensor& up) {
  dispatch_floating_cuda(dy.dtype(), "swiglu", [&]<class T>() {
    if (dgate.defined()) gpu::elementwise<T, T, T, T>(dgate, Dgate<T>{}, dy, gate, up);
    if (dup.defined()) gpu::elementwise<T, T, T>(dup, Dup<T>{}, dy, gate);
  });
}

}  // namespace tessera::ops
