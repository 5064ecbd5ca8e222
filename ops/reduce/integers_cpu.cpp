#include <algorithm>

#include "ops/reduce/plan_tiles_internal.h"
#include "ops/reduce/reduce_integers.h"

namespace tessera::ops {
namespace {

template <ReduceKind kKind, class T, class Y>
void run(Y* y, const T* x, const ReducePlan& plan) {
  const int last = plan.kept_rank - 1, inner = plan.reduced_rank - 1;
  const int64_t size = plan.reduced_sizes[inner], stride = plan.reduced_x[inner];
  for_each_tile(plan, plan.kept_rank == 0 || stride < plan.kept_x[last], [&](const PlanTile& tile) {
    Y totals[PlanTile::kMost];
    std::fill_n(totals, tile.width, kIntegerIdentity<kKind, Y>);
    for (int64_t outer = 0; outer < plan.length / size; ++outer) {
      const T* const row = x + tile.x + plan.reduced_offset(outer * size);
      for (int64_t i = 0; i < size; ++i)
        for (int64_t j = 0; j < tile.width; ++j)
          totals[j] = combine_integers<kKind>(totals[j], Y(row[i * stride + j * tile.column_x]));
    }
    for (int64_t j = 0; j < tile.width; ++j) y[tile.y + j * tile.column_y] = totals[j];
  });
}

}  // namespace

void reduce_integers_cpu(const Tensor& y, const Tensor& x, const ReducePlan& plan, ReduceKind kind) {
  dispatch_integer_reduction(x.dtype(), kind, [&]<ReduceKind kKind, class T, class Y>() {
    run<kKind>(y.data<Y>(), x.data<T>(), plan);
  });
}

}  // namespace tessera::ops
