#pragma once

#include <limits>

#include "ops/reduce/reduce_kernels.h"

/// Reductions of whole numbers: exact, so that their order does not matter.

namespace tessera::ops {

template <ReduceKind kKind, class T>
inline constexpr T kIntegerIdentity = kKind == ReduceKind::max   ? std::numeric_limits<T>::min()
                                      : kKind == ReduceKind::min ? std::numeric_limits<T>::max()
                                                                 : T(0);

/// Sums are modulo 2^64.
template <ReduceKind kKind, class T>
TESSERA_HD T combine_integers(T a, T b) {
  if constexpr (kKind == ReduceKind::max) return a > b ? a : b;
  if constexpr (kKind == ReduceKind::min) return a < b ? a : b;
  if constexpr (kKind == ReduceKind::sum) return T(uint64_t(a) + uint64_t(b));
}

/// y = the sum (i64 of i64, i32 and bool), or the largest or smallest element (of i64 and i32, in their
/// dtype) of x, as reduce_cpu does it.
void reduce_integers_cpu(const Tensor& y, const Tensor& x, const ReducePlan& plan, ReduceKind kind);
void reduce_integers_cuda(const Tensor& y, const Tensor& x, const ReducePlan& plan, ReduceKind kind);

/// Calls `f.template operator()<kind, T, Y>()` with the element types of x and y.
template <class F>
void dispatch_integer_reduction(DType dtype, ReduceKind kind, F&& f) {
  dispatch_among<int64_t, int32_t, bool>(
      dtype,
      [&]<class T>() {
        if (kind == ReduceKind::sum) return f.template operator()<ReduceKind::sum, T, int64_t>();
        if constexpr (!std::is_same_v<T, bool>) {
          if (kind == ReduceKind::max) return f.template operator()<ReduceKind::max, T, T>();
          f.template operator()<ReduceKind::min, T, T>();
        }
      },
      [] {});
}

}  // namespace tessera::ops
