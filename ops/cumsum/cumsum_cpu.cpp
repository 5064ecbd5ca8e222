#include <algorithm>

#include "ops/cumsum/cumsum_kernels.h"
#include "runtime/integers.h"
#include "runtime/parallel.h"

namespace tessera::ops {
namespace {

constexpr int64_t kTile = 128;     // lines that are walked side by side: their sums stay in the first cache
constexpr int64_t kGrain = 16384;  // elements below which a thread is not worth waking

template <class T>
RunningSum<T> term(T x) {
  if constexpr (std::is_integral_v<T>)
    return RunningSum<T>(x);
  else
    return double(Compute<T>(x));
}

template <class Y, class Sum>
Y rounded(Sum sum) {
  if constexpr (std::is_integral_v<Y>)
    return Y(sum);
  else
    return Y(Compute<Y>(sum));
}

template <class T, class Y>
void run(Y* y, const T* x, const Lines& lines, Running way) {
  const ReducePlan& plan = lines.plan;
  const int last = plan.kept_rank - 1;
  const bool by_rows = lines.by_rows();
  const int64_t columns = by_rows ? 1 : plan.kept_sizes[last], tiles = ceil_div(columns, kTile);
  const int64_t column_x = by_rows ? 0 : plan.kept_x[last], column_y = by_rows ? 0 : plan.kept_y[last];
  const int64_t work = plan.length * std::min(columns, kTile);
  parallel_for(plan.outputs / columns * tiles, std::max<int64_t>(1, kGrain / work),
               [&](int64_t begin, int64_t end) {
                 for (int64_t unit = begin; unit < end; ++unit) {
                   const int64_t first = unit % tiles * kTile, width = std::min(kTile, columns - first);
                   int64_t x_offset, y_offset;
                   plan.offsets(unit / tiles * columns + first, x_offset, y_offset);
                   RunningSum<T> sums[kTile] = {};
                   for (int64_t i = 0; i < plan.length; ++i) {
                     const int64_t at = way == Running::forward ? i : plan.length - 1 - i;
                     const T* const from = x + x_offset + at * plan.reduced_x[0];
                     Y* const to = y + y_offset + at * lines.y_stride;
                     for (int64_t j = 0; j < width; ++j) {
                       sums[j] += term(from[j * column_x]);
                       to[j * column_y] = rounded<Y>(sums[j]);
                     }
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
