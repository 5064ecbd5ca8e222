#include <algorithm>

#include "ops/cumprod/cumprod_kernels.h"
#include "ops/reduce/plan_tiles_internal.h"

namespace tessera::ops {
namespace {

template <class T, class Y>
void run(Y* y, const T* x, const Lines& lines) {
  const ReducePlan& plan = lines.plan;
  for_each_tile(plan, lines.by_rows(), [&](const PlanTile& tile) {
    RunningSum<T> products[PlanTile::kMost];
    std::fill_n(products, tile.width, RunningSum<T>(1));
    for (int64_t i = 0; i < plan.length; ++i)
      for (int64_t j = 0; j < tile.width; ++j) {
        products[j] *= widened(x[tile.x + i * plan.reduced_x[0] + j * tile.column_x]);
        y[tile.y + i * lines.y_stride + j * tile.column_y] = rounded<Y>(products[j]);
      }
  });
}

}  // namespace

void cumprod_cpu(const Tensor& y, const Tensor& x, int dim) {
  const Lines lines(x.layout(), y.layout(), dim);
  dispatch_among<double, float, bf16, f16, int64_t, int32_t>(
      x.dtype(),
      [&]<class T>() {
        run(y.data<std::conditional_t<std::is_integral_v<T>, int64_t, T>>(), x.data<T>(), lines);
      },
      [] {});
}

void cumprod_backward_cpu(const Tensor& dx, const Tensor& dy, const Tensor& x, const Tensor& y, int dim) {
  const Lines lines(x.layout(), dx.layout(), dim);  // of all four alike
  const int64_t length = lines.plan.length, stride = lines.y_stride;
  dispatch_floating(x.dtype(), "cumprod", [&]<class T>() {
    T* const out = dx.data<T>();
    const T *const in = dy.data<T>(), *const factors = x.data<T>(), *const products = y.data<T>();
    for_each_tile(lines.plan, lines.by_rows(), [&](const PlanTile& tile) {
      double sums[PlanTile::kMost] = {};  // s of the next element times that element
      for (int64_t i = length - 1; i >= 0; --i)
        for (int64_t j = 0; j < tile.width; ++j) {
          const int64_t at = tile.y + i * stride + j * tile.column_y;
          const double s = widened(in[at]) + sums[j];
          out[at] = rounded<T>(i > 0 ? widened(products[at - stride]) * s : s);
          sums[j] = widened(factors[at]) * s;
        }
    });
  });
}

}  // namespace tessera::ops
