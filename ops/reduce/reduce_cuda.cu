#include "gpu/elementwise.cuh"
#include "ops/reduce/reduce_kernels.h"
#include "ops/reduce/reduce_pass.cuh"

namespace tessera::ops {
namespace {

/// Sums are f64, as on the CPU: a long sum that cancels stays right, and an f64 addition an element is far
/// below what memory takes.
struct SumOf {
  using Acc = double;
  template <class T>
  using Partial = double;
  static constexpr bool kOrdered = false;
  static __device__ double identity() { return 0; }
  static __device__ double combine(double a, double b) { return a + b; }
  template <class T>
  __device__ double add(double all, T x, int64_t) const {
    return all + double(x);
  }
  SumOf rest() const { return {}; }
  template <class Out>
  __device__ void store(Out* y, int64_t at, int64_t, double sum, Finish how) const {
    if constexpr (std::is_same_v<Out, double>) {
      y[at] = sum;
    } else {
      const double mean = sum * how.share;
      if (!how.root)
        y[at] = Out(float(mean));
      else if constexpr (sizeof(Out) == 2)
        y[at] = Out(sqrtf(float(mean)));
      else
        y[at] = Out(float(sqrt(mean)));
    }
  }
};

/// Later passes add its sums.
struct SquaresOf : SumOf {
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

bool sum_products_cuda(const Tensor& y, const Tensor& a, const Tensor& b) {
  const ReducePlan plan = plan_to(a.layout(), y.layout());
  if (a.layout().strides != b.layout().strides || !is_one_pass(plan) || plan.length == 0) return false;
  if (plan.outputs == 0) return true;
  dispatch_floating_cuda(a.dtype(), "sum", [&]<class T>() {
    const Products<T> from{a.data<T>(), b.data<T>()};
    const bool alike =
        reinterpret_cast<uintptr_t>(from.x) % 16 == reinterpret_cast<uintptr_t>(from.other) % 16;
    reduce_pass(a.device(), plan, from, y.data<float>(), SumOf{}, Finish{}, alike);
  });
  return true;
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
