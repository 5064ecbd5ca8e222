#include <algorithm>
#include <cmath>
#include <limits>

#include "ops/reduce/reduce_kernels.h"
#include "tensor/elementwise.h"

/// Every sum runs in double, whatever the dtype: 10^9 terms of f32 stay exact to the last rounding. Work is
/// split by outputs alone, so the order of additions does not depend on the number of threads.

namespace tessera::ops {
namespace {

constexpr int64_t kTile = 128;  // columns that are reduced side by side: their sums stay in the first cache
constexpr int64_t kGrain = 16384;  // elements below which a thread is not worth waking

template <ReduceKind kKind>
constexpr double kIdentity = kKind == ReduceKind::max ? -std::numeric_limits<double>::infinity() : 0.0;

template <ReduceKind kKind, class T>
double lift(T x) {
  const double value = double(Compute<T>(x));
  return kKind == ReduceKind::norm ? value * value : value;
}

template <ReduceKind kKind>
double combine(double a, double b) {
  if constexpr (kKind == ReduceKind::max) return b > a || b != b ? (a != a ? a : b) : a;
  return a + b;
}

template <ReduceKind kKind>
double finish(double value, int64_t length) {
  if constexpr (kKind == ReduceKind::mean) return value / double(length);
  if constexpr (kKind == ReduceKind::norm) return std::sqrt(value);
  return value;
}

/// Calls `f(offset)` for every index of the reduced dimensions but the last.
template <class F>
void for_each_outer(const ReducePlan& plan, F&& f) {
  const int inner = plan.reduced_rank - 1;
  const int64_t outer = plan.length / plan.reduced_sizes[inner];
  for (int64_t index = 0; index < outer; ++index) {
    int64_t rest = index, offset = 0;
    for (int dim = inner - 1; dim >= 0; --dim) {
      offset += rest % plan.reduced_sizes[dim] * plan.reduced_x[dim];
      rest /= plan.reduced_sizes[dim];
    }
    f(offset);
  }
}

/// One output after the other, each along its elements; four sums at a time hide the latency of an addition.
template <ReduceKind kKind, class T, class Out>
void reduce_rows(Out* y, const T* x, const ReducePlan& plan) {
  const int inner = plan.reduced_rank - 1;
  const int64_t size = plan.reduced_sizes[inner], stride = plan.reduced_x[inner];
  parallel_for(plan.outputs, std::max<int64_t>(1, kGrain / plan.length), [&](int64_t begin, int64_t end) {
    for (int64_t output = begin; output < end; ++output) {
      int64_t x_offset, y_offset;
      plan.offsets(output, x_offset, y_offset);
      double sums[4] = {kIdentity<kKind>, kIdentity<kKind>, kIdentity<kKind>, kIdentity<kKind>};
      for_each_outer(plan, [&](int64_t outer) {
        const T* const row = x + x_offset + outer;
        int64_t i = 0;
        for (; i + 4 <= size; i += 4)
          for (int k = 0; k < 4; ++k) sums[k] = combine<kKind>(sums[k], lift<kKind>(row[(i + k) * stride]));
        for (; i < size; ++i) sums[0] = combine<kKind>(sums[0], lift<kKind>(row[i * stride]));
      });
      const double all = combine<kKind>(combine<kKind>(sums[0], sums[1]), combine<kKind>(sums[2], sums[3]));
      y[y_offset] = Out(Compute<Out>(finish<kKind>(all, plan.length)));
    }
  });
}

/// Neighbouring outputs side by side, so that x is read along its rows.
template <ReduceKind kKind, class T, class Out>
void reduce_columns(Out* y, const T* x, const ReducePlan& plan) {
  const int last = plan.kept_rank - 1, inner = plan.reduced_rank - 1;
  const int64_t columns = plan.kept_sizes[last], tiles = (columns + kTile - 1) / kTile;
  const int64_t column_x = plan.kept_x[last], column_y = plan.kept_y[last];
  const int64_t size = plan.reduced_sizes[inner], stride = plan.reduced_x[inner];
  const int64_t work = plan.length * std::min(columns, kTile);
  parallel_for(plan.outputs / columns * tiles, std::max<int64_t>(1, kGrain / work),
               [&](int64_t begin, int64_t end) {
                 for (int64_t unit = begin; unit < end; ++unit) {
                   const int64_t first = unit % tiles * kTile, width = std::min(kTile, columns - first);
                   int64_t x_offset, y_offset;
                   plan.offsets(unit / tiles * columns + first, x_offset, y_offset);
                   double sums[kTile];
                   for (int64_t j = 0; j < width; ++j) sums[j] = kIdentity<kKind>;
                   for_each_outer(plan, [&](int64_t outer) {
                     for (int64_t i = 0; i < size; ++i) {
                       const T* const row = x + x_offset + outer + i * stride;
                       if (column_x == 1) {
                         for (int64_t j = 0; j < width; ++j)
                           sums[j] = combine<kKind>(sums[j], lift<kKind>(row[j]));
                       } else {
                         for (int64_t j = 0; j < width; ++j)
                           sums[j] = combine<kKind>(sums[j], lift<kKind>(row[j * column_x]));
                       }
                     }
                   });
                   for (int64_t j = 0; j < width; ++j)
                     y[y_offset + j * column_y] = Out(Compute<Out>(finish<kKind>(sums[j], plan.length)));
                 }
               });
}

template <ReduceKind kKind, class T, class Out>
void reduce(const Tensor& y, const Tensor& x, const ReducePlan& plan) {
  const bool by_rows =
      plan.kept_rank == 0 || plan.reduced_x[plan.reduced_rank - 1] < plan.kept_x[plan.kept_rank - 1];
  if (by_rows) {
    reduce_rows<kKind>(y.data<Out>(), x.data<T>(), plan);
  } else {
    reduce_columns<kKind>(y.data<Out>(), x.data<T>(), plan);
  }
}

}  // namespace

void reduce_cpu(const Tensor& y, const Tensor& x, const ReducePlan& plan, ReduceKind kind) {
  dispatch_floating(x.dtype(), name_of(kind), [&]<class T>() {
    if (y.dtype() != x.dtype() && kind == ReduceKind::norm)
      return reduce<ReduceKind::norm, T, Compute<T>>(y, x, plan);
    if (y.dtype() != x.dtype()) return reduce<ReduceKind::sum, T, Compute<T>>(y, x, plan);
    switch (kind) {
      case ReduceKind::sum:
        return reduce<ReduceKind::sum, T, T>(y, x, plan);
      case ReduceKind::mean:
        return reduce<ReduceKind::mean, T, T>(y, x, plan);
      case ReduceKind::max:
        return reduce<ReduceKind::max, T, T>(y, x, plan);
      case ReduceKind::norm:
        return reduce<ReduceKind::norm, T, T>(y, x, plan);
    }
  });
}

void spread_cpu(const Tensor& dx, const Tensor& dy, int64_t count) {
  dispatch_floating(dx.dtype(), "sum", [&]<class T>() {
    const auto divisor = Compute<T>(count);
    elementwise_cpu<T>(
        dx, [divisor](Compute<T> g) { return g / divisor; }, dy);
  });
}

void l2_backward_cpu(const Tensor& dx, const Tensor& dy, const Tensor& x, const Tensor& y) {
  dispatch_floating(dx.dtype(), "norm", [&]<class T>() {
    using C = Compute<T>;
    elementwise_cpu<T>(
        dx, [](C g, C v, C length) { return length == 0 ? C(0) : g * (v / length); }, dy, x, y);
  });
}

namespace {

/// Whether max takes this element: `largest` is NaN if any is.
template <class C>
bool is_largest(C value, C largest) {
  return value == largest || value != value;
}

/// Calls `found(output, place)` for each output with the place along the reduced dimension of the first
/// element that max takes, one output after the other.
template <class T, class Found>
void find_in_rows(const T* x, const T* y, const ReducePlan& plan, Found&& found) {
  using C = Compute<T>;
  parallel_for(plan.outputs, std::max<int64_t>(1, kGrain / plan.length), [&](int64_t begin, int64_t end) {
    for (int64_t output = begin; output < end; ++output) {
      int64_t x_offset, y_offset, place = 0;
      plan.offsets(output, x_offset, y_offset);
      const C largest = C(y[y_offset]);
      while (place + 1 < plan.length && !is_largest(C(x[x_offset + place * plan.reduced_x[0]]), largest))
        ++place;
      found(output, place);
    }
  });
}

/// The same for neighbouring outputs side by side, so that x is read along its rows.
template <class T, class Found>
void find_in_columns(const T* x, const T* y, const ReducePlan& plan, Found&& found) {
  using C = Compute<T>;
  const int last = plan.kept_rank - 1;
  const int64_t columns = plan.kept_sizes[last], tiles = (columns + kTile - 1) / kTile;
  const int64_t work = plan.length * std::min(columns, kTile);
  parallel_for(plan.outputs / columns * tiles, std::max<int64_t>(1, kGrain / work),
               [&](int64_t begin, int64_t end) {
                 for (int64_t unit = begin; unit < end; ++unit) {
                   const int64_t first = unit % tiles * kTile, width = std::min(kTile, columns - first);
                   const int64_t output = unit / tiles * columns + first;
                   int64_t x_offset, y_offset;
                   plan.offsets(output, x_offset, y_offset);
                   C largest[kTile], values[kTile];
                   int64_t places[kTile];
                   widen(largest, y + y_offset, width, plan.kept_y[last]);
                   std::fill_n(places, width, plan.length - 1);
                   for (int64_t i = plan.length - 2; i >= 0; --i) {
                     widen(values, x + x_offset + i * plan.reduced_x[0], width, plan.kept_x[last]);
                     for (int64_t j = 0; j < width; ++j)
                       places[j] = is_largest(values[j], largest[j]) ? i : places[j];
                   }
                   for (int64_t j = 0; j < width; ++j) found(output + j, places[j]);
                 }
               });
}

}  // namespace

void max_backward_cpu(const Tensor& dx, const Tensor& dy, const Tensor& x, const Tensor& y, int dim) {
  dx.fill(0);
  const ReducePlan from = plan_dim(x.layout(), dim, y.layout());
  const ReducePlan to = plan_dim(dx.layout(), dim, dy.layout());
  if (from.outputs == 0) return;
  const bool by_rows = from.kept_rank == 0 || from.reduced_x[0] < from.kept_x[from.kept_rank - 1];
  dispatch_floating(dx.dtype(), "max", [&]<class T>() {
    const auto found = [&](int64_t output, int64_t place) {
      int64_t dx_offset, dy_offset;
      to.offsets(output, dx_offset, dy_offset);
      dx.data<T>()[dx_offset + place * to.reduced_x[0]] = dy.data<T>()[dy_offset];
    };
    if (by_rows) {
      find_in_rows(x.data<T>(), y.data<T>(), from, found);
    } else {
      find_in_columns(x.data<T>(), y.data<T>(), from, found);
    }
  });
}

}  // namespace tessera::ops
