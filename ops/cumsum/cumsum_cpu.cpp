#include "ops/cumsum/cumsum_kernels.h"
#include "ops/reduce/plan_tiles_internal.h"

namespace tessera::ops {
namespace {

template <class T, class Y>
void run(Y* y, const T* x, const Lines& lines, Running way) {
  const ReducePlan& plan = lines.plan;
  for_each_tile(plan, lines.by_rows(), [&](const PlanTile& tile) {
    RunningSum<T> sums[PlanTile::kMost] = {};
    for (int64_t i = 0; i < plan.length; ++i) {
      const int64_t at = way == Running::forward ? i : plan.length - 1 - i;
      const T* const from = x + tile.x + at * plan.reduced_x[0];
      Y* const to = y + tile.y + at * lines.y_stride;
      for (int64_t j = 0; j < tile.width; ++j) {
        sums[j] += widened(from[j * tile.column_x]);
        to[j * tile.column_y] = rounded<Y>(sums[j]);
      }
    }
  });
}

}  // namespace

void cumsum_cpu(const Tensor& y, const Tensor& x, int dim, Running way) {
  dispatch_summed<double, float, bf16, f16>(
      x.dtype(),
      [&]<class T, class Y>() { run(y.data<Y>(), x.data<T>(), Lines(x.layout(), y.layout(), dim), way); },
      [&] {
        fail_at(Site::here(), "cumsum: dtype ", x.dtype(),
                " is not supported; expected f64, f32, bf16, f16, i64, i32 or bool");
      });
}

}  // namespace tessera::ops
