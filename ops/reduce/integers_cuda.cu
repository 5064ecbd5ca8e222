#include "ops/reduce/reduce_integers.h"
#include "ops/reduce/reduce_pass.cuh"

namespace tessera::ops {
namespace {

/// Of elements of type T, for reduce_pass.cuh.
template <ReduceKind kKind, class T, class Y>
struct WholeOf {
  using Acc = Y;
  template <class>
  using Partial = Y;
  static constexpr bool kOrdered = sizeof(T) == 1;  // sixteen sums of i64 would not fit into the registers
  static __device__ Y identity() { return kIntegerIdentity<kKind, Y>; }
  static __device__ Y combine(Y a, Y b) { return combine_integers<kKind>(a, b); }
  __device__ Y add(Y all, T x, int64_t) const { return combine(all, Y(x)); }
  WholeOf<kKind, Y, Y> rest() const { return {}; }
  __device__ void store(Y* y, int64_t at, int64_t, Y all, Finish) const { y[at] = all; }
};

}  // namespace

void reduce_integers_cuda(const Tensor& y, const Tensor& x, const ReducePlan& plan, ReduceKind kind) {
  dispatch_integer_reduction(x.dtype(), kind, [&]<ReduceKind kKind, class T, class Y>() {
    reduce_all(x.device(), plan, x.data<T>(), y.data<Y>(), WholeOf<kKind, T, Y>{}, Finish{});
  });
}

}  // namespace tessera::ops
