#pragma once

#include <type_traits>

#include "ops/cumsum/cumsum.h"
#include "ops/reduce/reduce_plan.h"

namespace tessera::ops {

/// Which way the sums run: from the first element on, or from the last one back (the gradient).
enum class Running : uint8_t { forward, backward };

/// The lines of x along `dim`, each with a running sum in y, which has x's shape. The plan's outputs are the
/// lines: where each begins in x and in y. Both have elements.
struct Lines {
  Lines(const Layout& x, const Layout& y, int dim);

  ReducePlan plan;
  int64_t y_stride;
  /// Whether lines are walked one by one, or neighbouring ones side by side, so that memory is read in order.
  bool by_rows() const { return plan.kept_rank == 0 || plan.reduced_x[0] < plan.kept_x[plan.kept_rank - 1]; }
};

/// y, floating as x or i64, = the running sums of x.
void cumsum_cpu(const Tensor& y, const Tensor& x, int dim, Running way);
void cumsum_cuda(const Tensor& y, const Tensor& x, int dim, Running way);

/// What x's elements are added up in: integers modulo 2^64.
template <class T>
using RunningSum = std::conditional_t<std::is_integral_v<T>, unsigned long long, double>;
/// An element as such a term (or factor), and a result rounded to y's dtype.
template <class T>
TESSERA_HD RunningSum<T> widened(T x) {
  if constexpr (std::is_integral_v<T>)
    return RunningSum<T>(x);
  else
    return double(Compute<T>(x));
}
template <class Y, class Sum>
TESSERA_HD Y rounded(Sum sum) {
  if constexpr (std::is_integral_v<Y>)
    return Y(sum);
  else
    return Y(Compute<Y>(sum));
}

/// Calls `f.template operator()<T, Y>()` with the element types of x and y for `dtype`, x's; otherwise calls
/// `refuse`, which throws.
template <class... Floating, class F, class Refuse>
void dispatch_summed(DType dtype, F&& f, Refuse&& refuse) {
  dispatch_among<Floating..., int64_t, int32_t, bool>(
      dtype,
      [&]<class T>() { f.template operator()<T, std::conditional_t<std::is_integral_v<T>, int64_t, T>>(); },
      refuse);
}

}  // namespace tessera::ops
