#include "ops/reduce/reduce_kernels.h"
#include "ops/reduce/reduce_pass.cuh"

/// Maxima and minima with the index of the first element that is one: one read of x. Backward writes zeros,
/// and the gradient at those elements.

namespace tessera::ops {
namespace {

/// An element, as f32 or i64, and its index. NaN comes before every number, and of equals the first.
template <class V>
struct Chosen {
  V value;
  int64_t index;
};
template <class T>
using ValueOf = std::conditional_t<std::is_integral_v<T>, int64_t, float>;

template <class V>
__device__ __forceinline__ Chosen<V> from_lane(const Chosen<V>& chosen, int step) {
  return {__shfl_xor_sync(0xFFFFFFFFu, chosen.value, step), __shfl_xor_sync(0xFFFFFFFFu, chosen.index, step)};
}

template <bool kMost, class V>
struct FirstOf {
  using Acc = Chosen<V>;
  template <class T>
  using Partial = Acc;
  static constexpr bool kOrdered = true;
  int64_t* index;  // by number of the output

  static __device__ Acc identity() {
    if constexpr (std::is_integral_v<V>)
      return {kMost ? INT64_MIN : INT64_MAX, INT64_MAX};
    else
      return {kMost ? -__builtin_huge_valf() : __builtin_huge_valf(), INT64_MAX};
  }
  static __device__ Acc combine(const Acc& a, const Acc& b) {
    const bool nan_a = a.value != a.value, nan_b = b.value != b.value;
    const bool equal = a.value == b.value || (nan_a && nan_b);
    const bool better = kMost ? b.value > a.value : b.value < a.value;
    return (equal ? b.index < a.index : better || (nan_b && !nan_a)) ? b : a;
  }
  template <class T>
  __device__ Acc add(const Acc& all, T x, int64_t at) const {
    const V value = V(x);
    const bool better = kMost ? !(value <= all.value) : !(value >= all.value);  // or one of both is NaN
    return all.index == INT64_MAX || (better && all.value == all.value) ? Acc{value, at} : all;
  }
  __device__ Acc add(const Acc& all, const Acc& x, int64_t) const { return combine(all, x); }
  FirstOf rest() const { return *this; }
  template <class Out>
  __device__ void store(Out* y, int64_t at, int64_t output, const Acc& chosen, Finish) const {
    if constexpr (std::is_same_v<Out, Acc>) {
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
  const auto choose = [&]<class T>() {
    T* const to = y.defined() ? y.data<T>() : nullptr;
    const auto run = [&]<bool kMost>() {
      reduce_pass(x.device(), plan, Elements<T>{x.data<T>()}, to,
                  FirstOf<kMost, ValueOf<T>>{index.data<int64_t>()}, Finish{});
    };
    most ? run.template operator()<true>() : run.template operator()<false>();
  };
  dispatch_among<float, bf16, f16, int64_t, int32_t>(x.dtype(), choose, [&] {
    fail_at(Site::here(), most ? "max" : "min", ": dtype ", x.dtype(), " is not supported on device cuda");
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
