#include "ops/reduce/reduce_kernels.h"
#include "ops/reduce/reduce_pass.cuh"

/// Maxima and minima with the index of the first element that is one: one read of x. Backward writes zeros,
/// and the gradient at those elements.

namespace tessera::ops {
namespace {

/// An element and its index. NaN comes before every number, and of equals the first.
struct Chosen {
  float value;
  int64_t index;
};

__device__ __forceinline__ Chosen from_lane(const Chosen& chosen, int step) {
  return {__shfl_xor_sync(0xFFFFFFFFu, chosen.value, step), __shfl_xor_sync(0xFFFFFFFFu, chosen.index, step)};
}

template <bool kMost>
struct FirstOf {
  using Acc = Chosen;
  template <class T>
  using Partial = Chosen;
  static constexpr bool kOrdered = true;
  int64_t* index;  // by number of the output

  static __device__ Chosen identity() {
    return {kMost ? -__builtin_huge_valf() : __builtin_huge_valf(), INT64_MAX};
  }
  static __device__ Chosen combine(const Chosen& a, const Chosen& b) {
    const bool nan_a = a.value != a.value, nan_b = b.value != b.value;
    const bool equal = a.value == b.value || (nan_a && nan_b);
    const bool better = kMost ? b.value > a.value : b.value < a.value;
    return (equal ? b.index < a.index : better || (nan_b && !nan_a)) ? b : a;
  }
  template <class T>
  __device__ Chosen add(const Chosen& all, T x, int64_t at) const {
    const float value = float(x);
    const bool better = kMost ? !(value <= all.value) : !(value >= all.value);  // or one of both is NaN
    return all.index == INT64_MAX || (better && all.value == all.value) ? Chosen{value, at} : all;
  }
  __device__ Chosen add(const Chosen& all, const Chosen& x, int64_t) const { return combine(all, x); }
  FirstOf rest() const { return *this; }
  template <class Out>
  __device__ void store(Out* y, int64_t at, int64_t output, const Chosen& chosen, Finish) const {
    if constexpr (std::is_same_v<Out, Chosen>) {
      y[at] = chosen;
    } else {
      if (y) y[at] = Out(chosen.value);
      index[output] = chosen.index;
    }
  }
};

/// dx at the chosen element of each output; dx is 0 elsewhere already.
template <class T>
__global__ void __launch_bounds__(kThreads)
    scatter_kernel(const ReducePlan plan, T* dx, const T* dy, const int64_t* chosen) {
  gpu::wait_and_launch_dependents();
  const int64_t output = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (output >= plan.outputs) return;
  int64_t dx_offset, dy_offset;
  plan.offsets(output, dx_offset, dy_offset);
  dx[dx_offset + plan.reduced_offset(chosen[output])] = dy[dy_offset];
}

}  // namespace

void choose_cuda(const Tensor& y, const Tensor& index, const Tensor& x, const ReducePlan& plan, bool most) {
  dispatch_floating_cuda(x.dtype(), most ? "max" : "min", [&]<class T>() {
    T* const to = y.defined() ? y.data<T>() : nullptr;
    const auto run = [&]<bool kMost>() {
      reduce_pass(x.device(), plan, Elements<T>{x.data<T>()}, to, FirstOf<kMost>{index.data<int64_t>()},
                  Finish{});
    };
    most ? run.template operator()<true>() : run.template operator()<false>();
  });
}

void choose_backward_cuda(const Tensor& dx, const Tensor& dy, const Tensor& index, const ReducePlan& plan) {
  dx.fill(0);
  if (plan.outputs == 0) return;
  dispatch_floating_cuda(dx.dtype(), "max", [&]<class T>() {
    gpu::launch_dependent(dx.device(), {gpu::grid_of(gpu::ceil_div(plan.outputs, kThreads)), kThreads},
                          scatter_kernel<T>, plan, dx.data<T>(), dy.data<T>(), index.data<int64_t>());
  });
}

}  // namespace tessera::ops
