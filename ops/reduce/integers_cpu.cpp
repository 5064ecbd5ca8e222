#include <algorithm>

#include "ops/reduce/reduce_integers.h"
#include "runtime/integers.h"
#include "runtime/parallel.h"

namespace tessera::ops {
namespace {

constexpr int64_t kTile = 128;     // columns that are reduced side by side
constexpr int64_t kGrain = 16384;  // elements below which a thread is not worth waking

template <ReduceKind kKind, class T, class Y>
void run(Y* y, const T* x, const ReducePlan& plan) {
  const int last = plan.kept_rank - 1, inner = plan.reduced_rank - 1;
  const int64_t size = plan.reduced_sizes[inner], stride = plan.reduced_x[inner];
  const bool by_rows = plan.kept_rank == 0 || stride < plan.kept_x[last];
  const int64_t columns = by_rows ? 1 : plan.kept_sizes[last], tiles = ceil_div(columns, kTile);
  const int64_t column_x = by_rows ? 0 : plan.kept_x[last], column_y = by_rows ? 0 : plan.kept_y[last];
  const int64_t work = plan.length * std::min(columns, kTile);
  parallel_for(plan.outputs / columns * tiles, std::max<int64_t>(1, kGrain / work),
               [&](int64_t begin, int64_t end) {
                 for (int64_t unit = begin; unit < end; ++unit) {
                   const int64_t first = unit % tiles * kTile, width = std::min(kTile, columns - first);
                   int64_t x_offset, y_offset;
                   plan.offsets(unit / tiles * columns + first, x_offset, y_offset);
                   Y totals[kTile];
                   std::fill_n(totals, width, kIntegerIdentity<kKind, Y>);
                   for (int64_t outer = 0; outer < plan.length / size; ++outer) {
                     const T* const row = x + x_offset + plan.reduced_offset(outer * size);
                     for (int64_t i = 0; i < size; ++i)
                       for (int64_t j = 0; j < width; ++j)
                         totals[j] = combine_integers<kKind>(totals[j], Y(row[i * stride + j * column_x]));
                   }
                   for (int64_t j = 0; j < width; ++j) y[y_offset + j * column_y] = totals[j];
                 }
               });
}

}  // namespace

void reduce_integers_cpu(const Tensor& y, const Tensor& x, const ReducePlan& plan, ReduceKind kind) {
  dispatch_integer_reduction(x.dtype(), kind, [&]<ReduceKind kKind, class T, class Y>() {
    run<kKind>(y.data<Y>(), x.data<T>(), plan);
  });
}

}  // namespace tessera::ops
