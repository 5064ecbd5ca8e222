#include "gpu/elementwise.cuh"
#include "ops/reduce/reduce_kernels.h"
#include "ops/reduce/reduce_pass.cuh"
#include "ops/reduce/sum_of.cuh"

namespace tessera::ops {
namespace {

/// Later passes add its sums. Squares of bf16 leave the range of f32, so none are joined there.
struct SquaresOf : SumOf {
  template <class T>
  static constexpr bool kJoins = false;
  template <class T>
  __device__ double add(double all, T x, int64_t) const {
    return all + double(x) * double(x);
  }
};

/// The maximum is one of the elements: exact.
struct MaxOf {
  using Acc = float;
  template <class T>
  using Partial = T;
  static constexpr bool kOrdered = false;
  static __device__ float identity() { return -__builtin_huge_valf(); }
  static __device__ float combine(float a, float b) { return a != a ? a : (b > a || b != b ? b : a); }
  template <class T>
  __device__ float add(float all, T x, int64_t) const {
    return combine(all, float(x));
  }
  MaxOf rest() const { return {}; }
  template <class Out>
  __device__ void store(Out* y, int64_t at, int64_t, float value, Finish) const {
    y[at] = Out(value);
  }
};

struct MinOf : MaxOf {
  static __device__ float identity() { return __builtin_huge_valf(); }
  static __device__ float combine(float a, float b) { return a != a ? a : (b < a || b != b ? b : a); }
  template <class T>
  __device__ float add(float all, T x, int64_t) const {
    return combine(all, float(x));
  }
  MinOf rest() const { return {}; }
};

template <class T>
struct Spread {
  float count;
  __device__ T operator()(T dy) const { return T(float(dy) / count); }
};

template <class T>
struct L2Backward {
  __device__ T operator()(T dy, T x, T y) const {
    const float length = float(y);
    return length == 0 ? T(0.0f) : T(float(dy) * (float(x) / length));
  }
};

}  // namespace

void reduce_cuda(const Tensor& y, const Tensor& x, const ReducePlan& plan, ReduceKind kind) {
  const Device device = x.device();
  dispatch_floating_cuda(x.dtype(), name_of(kind), [&]<class T>() {
    const T* const from = x.data<T>();
    if (y.dtype() != x.dtype() && kind == ReduceKind::norm)
      return reduce_all(device, plan, from, y.data<float>(), SquaresOf{}, Finish{.root = true});
    if (y.dtype() != x.dtype()) return reduce_all(device, plan, from, y.data<float>(), SumOf{}, Finish{});
    T* const to = y.data<T>();
    switch (kind) {
      case ReduceKind::sum:
        return reduce_all(device, plan, from, to, SumOf{}, Finish{});
      case ReduceKind::mean:
        return reduce_all(device, plan, from, to, SumOf{}, Finish{.share = 1 / double(plan.length)});
      case ReduceKind::max:
        return reduce_all(device, plan, from, to, MaxOf{}, Finish{});
      case ReduceKind::min:
        return reduce_all(device, plan, from, to, MinOf{}, Finish{});
      case ReduceKind::norm:
        return reduce_all(device, plan, from, to, SquaresOf{}, Finish{.root = true});
    }
  });
}

void spread_cuda(const Tensor& dx, const Tensor& dy, int64_t count) {
  dispatch_floating_cuda(dx.dtype(), "sum",
                         [&]<class T>() { gpu::elementwise<T, T>(dx, Spread<T>{float(count)}, dy); });
}

void l2_backward_cuda(const Tensor& dx, const Tensor& dy, const Tensor& x, const Tensor& y) {
  dispatch_floating_cuda(dx.dtype(), "norm",
                         [&]<class T>() { gpu::elementwise<T, T, T, T>(dx, L2Backward<T>{}, dy, x, y); });
}

}  // namespace tessera::ops
