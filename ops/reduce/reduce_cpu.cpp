#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>
#include <vector>

#include "ops/elementwise.h"
#include "ops/reduce/reduce_kernels.h"
#include "runtime/integers.h"
#include "tensor/convert.h"

/// Every sum runs in double, whatever the dtype: 10^9 terms of f32 stay exact to the last rounding. Work is
/// split by the shape alone, so the order of additions does not depend on the number of threads.

namespace tessera::ops {
namespace {

constexpr int64_t kTile = 128;  // columns that are reduced side by side: their sums stay in the first cache
constexpr int64_t kGrain = 16384;  // elements below which a thread is not worth waking
constexpr int64_t kAtOnce = 512;   // elements of 16 bits that are widened together
constexpr int64_t kShort = 16;     // elements of a row below which there is nothing to interleave

/// What is added up in double; the largest or smallest of numbers is one of them.
template <ReduceKind kKind, class T>
using Total = std::conditional_t<kKind == ReduceKind::max || kKind == ReduceKind::min, Compute<T>, double>;

template <ReduceKind kKind, class A>
constexpr A kIdentity = kKind == ReduceKind::max   ? -std::numeric_limits<A>::infinity()
                        : kKind == ReduceKind::min ? std::numeric_limits<A>::infinity()
                                                   : A(0);

template <ReduceKind kKind, class A, class C>
A lift(C x) {
  const auto value = A(x);
  return kKind == ReduceKind::norm ? value * value : value;
}

template <ReduceKind kKind, class A>
A combine(A a, A b) {
  if constexpr (kKind == ReduceKind::max) return a >= b || a != a ? a : b;
  if constexpr (kKind == ReduceKind::min) return a <= b || a != a ? a : b;
  return a + b;
}

template <ReduceKind kKind>
double finish(double value, int64_t length) {
  if constexpr (kKind == ReduceKind::mean) return value / double(length);
  if constexpr (kKind == ReduceKind::norm) return std::sqrt(value);
  return value;
}

/// A total in interleaved parts, a fixed order that vectorises: four registers of 32 bytes hide the latency
/// of an addition.
template <ReduceKind kKind, class T>
class Lanes {
 public:
  using A = Total<kKind, T>;

  Lanes() { std::fill_n(parts_, kLanes, kIdentity<kKind, A>); }
  /// n elements, `stride` apart.
  void take(const T* x, int64_t n, int64_t stride) {
    if constexpr (std::is_same_v<T, Compute<T>>) {
      if (stride == 1) return take_packed(x, n);
    }
    Compute<T> wide[kAtOnce];
    for (int64_t i = 0; i < n; i += kAtOnce) {
      const int64_t some = std::min(kAtOnce, n - i);
      widen(wide, x + i * stride, some, stride);
      take_packed(wide, some);
    }
  }
  A total() const {
    A all = parts_[0];
    for (int lane = 1; lane < kLanes; ++lane) all = combine<kKind>(all, parts_[lane]);
    return all;
  }

 private:
  static constexpr int kLanes = 128 / sizeof(A);

  void take_packed(const Compute<T>* x, int64_t n) {
    A parts[kLanes];  // not members, so that they stay in registers
    std::copy_n(parts_, kLanes, parts);
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes)
      for (int lane = 0; lane < kLanes; ++lane)
        parts[lane] = combine<kKind>(parts[lane], lift<kKind, A>(x[i + lane]));
    for (int lane = 0; i < n; ++i, ++lane) parts[lane] = combine<kKind>(parts[lane], lift<kKind, A>(x[i]));
    std::copy_n(parts, kLanes, parts_);
  }

  A parts_[kLanes];
};

/// Calls `f(offset)` for the indices begin ... end - 1 of the reduced dimensions but the last.
template <class F>
void for_outer(const ReducePlan& plan, int64_t begin, int64_t end, F&& f) {
  for (int64_t index = begin; index < end; ++index) {
    int64_t rest = index, offset = 0;
    for (int dim = plan.reduced_rank - 2; dim >= 0; --dim) {
      offset += rest % plan.reduced_sizes[dim] * plan.reduced_x[dim];
      rest /= plan.reduced_sizes[dim];
    }
    f(offset);
  }
}

/// One output after the other, each along its elements. A long one is cut into chunks, whose totals are
/// combined in their order: what one reduction of everything is made of runs on all threads.
template <ReduceKind kKind, class T, class Out>
void reduce_rows(Out* y, const T* x, const ReducePlan& plan) {
  using A = Total<kKind, T>;
  const int inner = plan.reduced_rank - 1;
  const int64_t size = plan.reduced_sizes[inner], stride = plan.reduced_x[inner];
  const int64_t outer = plan.length / size;
  // A chunk is a part of a row, or some whole ones.
  const int64_t part = std::min(size, kGrain), parts = ceil_div(size, part);
  const int64_t rows = std::min(outer, std::max<int64_t>(1, kGrain / size));
  const int64_t chunks = parts * ceil_div(outer, rows);
  const auto chunk_total = [&](const T* from, int64_t chunk) {
    if (plan.length < kShort && outer == 1) {
      A total = kIdentity<kKind, A>;
      for (int64_t i = 0; i < size; ++i)
        total = combine<kKind>(total, lift<kKind, A>(Compute<T>(from[i * stride])));
      return total;
    }
    const int64_t first = chunk % parts * part, row = chunk / parts * rows;
    Lanes<kKind, T> lanes;
    for_outer(plan, row, std::min(outer, row + rows), [&](int64_t offset) {
      lanes.take(from + offset + first * stride, std::min(part, size - first), stride);
    });
    return lanes.total();
  };
  const auto write = [&](int64_t y_offset, A total) {
    y[y_offset] = Out(Compute<Out>(finish<kKind>(double(total), plan.length)));
  };
  if (chunks == 1)
    return parallel_for(plan.outputs, std::max<int64_t>(1, kGrain / plan.length),
                        [&](int64_t begin, int64_t end) {
                          for (int64_t output = begin; output < end; ++output) {
                            int64_t x_offset, y_offset;
                            plan.offsets(output, x_offset, y_offset);
                            write(y_offset, chunk_total(x + x_offset, 0));
                          }
                        });
  std::vector<A> totals(size_t(plan.outputs * chunks));
  parallel_for(plan.outputs * chunks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t unit = begin; unit < end; ++unit) {
      int64_t x_offset, y_offset;
      plan.offsets(unit / chunks, x_offset, y_offset);
      totals[size_t(unit)] = chunk_total(x + x_offset, unit % chunks);
    }
  });
  for (int64_t output = 0; output < plan.outputs; ++output) {
    int64_t x_offset, y_offset;
    plan.offsets(output, x_offset, y_offset);
    A total = kIdentity<kKind, A>;
    for (int64_t chunk = 0; chunk < chunks; ++chunk)
      total = combine<kKind>(total, totals[size_t(output * chunks + chunk)]);
    write(y_offset, total);
  }
}

/// Neighbouring outputs side by side, so that x is read along its rows.
template <ReduceKind kKind, class T, class Out>
void reduce_columns(Out* y, const T* x, const ReducePlan& plan) {
  using A = Total<kKind, T>;
  const int last = plan.kept_rank - 1, inner = plan.reduced_rank - 1;
  const int64_t columns = plan.kept_sizes[last], tiles = ceil_div(columns, kTile);
  const int64_t column_x = plan.kept_x[last], column_y = plan.kept_y[last];
  const int64_t size = plan.reduced_sizes[inner], stride = plan.reduced_x[inner];
  const int64_t work = plan.length * std::min(columns, kTile);
  parallel_for(
      plan.outputs / columns * tiles, std::max<int64_t>(1, kGrain / work), [&](int64_t begin, int64_t end) {
        for (int64_t unit = begin; unit < end; ++unit) {
          const int64_t first = unit % tiles * kTile, width = std::min(kTile, columns - first);
          int64_t x_offset, y_offset;
          plan.offsets(unit / tiles * columns + first, x_offset, y_offset);
          A totals[kTile];
          std::fill_n(totals, width, kIdentity<kKind, A>);
          const auto take = [&](const Compute<T>* row) {
            for (int64_t j = 0; j < width; ++j) totals[j] = combine<kKind>(totals[j], lift<kKind, A>(row[j]));
          };
          for_outer(plan, 0, plan.length / size, [&](int64_t outer) {
            for (int64_t i = 0; i < size; ++i) {
              const T* const row = x + x_offset + outer + i * stride;
              if constexpr (std::is_same_v<T, Compute<T>>) {
                if (column_x == 1) {
                  take(row);
                  continue;
                }
              }
              Compute<T> wide[kTile];
              widen(wide, row, width, column_x);
              take(wide);
            }
          });
          for (int64_t j = 0; j < width; ++j)
            y[y_offset + j * column_y] = Out(Compute<Out>(finish<kKind>(double(totals[j]), plan.length)));
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
      case ReduceKind::min:
        return reduce<ReduceKind::min, T, T>(y, x, plan);
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

/// What is compared: whole numbers as they are, 16-bit floats as f32.
template <class T>
using Compared = std::conditional_t<std::is_integral_v<T>, T, Compute<T>>;

/// Whether max or min takes this element: `chosen`, its result, is NaN if any element is.
template <class C>
bool is_chosen(C value, C chosen) {
  return value == chosen || value != value;
}

/// Calls `found(output, place)` for each output with the place along the reduced dimension of the first
/// element that max or min takes, one output after the other.
template <class T, class Found>
void find_in_rows(const T* x, const T* y, const ReducePlan& plan, Found&& found) {
  using C = Compared<T>;
  parallel_for(plan.outputs, std::max<int64_t>(1, kGrain / plan.length), [&](int64_t begin, int64_t end) {
    for (int64_t output = begin; output < end; ++output) {
      int64_t x_offset, y_offset, place = 0;
      plan.offsets(output, x_offset, y_offset);
      const C chosen = C(y[y_offset]);
      while (place + 1 < plan.length && !is_chosen(C(x[x_offset + place * plan.reduced_x[0]]), chosen))
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
  const int64_t columns = plan.kept_sizes[last], tiles = ceil_div(columns, kTile);
  const int64_t work = plan.length * std::min(columns, kTile);
  parallel_for(plan.outputs / columns * tiles, std::max<int64_t>(1, kGrain / work),
               [&](int64_t begin, int64_t end) {
                 for (int64_t unit = begin; unit < end; ++unit) {
                   const int64_t first = unit % tiles * kTile, width = std::min(kTile, columns - first);
                   const int64_t output = unit / tiles * columns + first;
                   int64_t x_offset, y_offset;
                   plan.offsets(output, x_offset, y_offset);
                   C chosen[kTile], values[kTile];
                   int64_t places[kTile];
                   widen(chosen, y + y_offset, width, plan.kept_y[last]);
                   std::fill_n(places, width, plan.length - 1);
                   for (int64_t i = plan.length - 2; i >= 0; --i) {
                     widen(values, x + x_offset + i * plan.reduced_x[0], width, plan.kept_x[last]);
                     for (int64_t j = 0; j < width; ++j)
                       places[j] = is_chosen(values[j], chosen[j]) ? i : places[j];
                   }
                   for (int64_t j = 0; j < width; ++j) found(output + j, places[j]);
                 }
               });
}

template <class T, class Found>
void find(const Tensor& x, const Tensor& y, int dim, Found&& found) {
  const ReducePlan plan = plan_dim(x.layout(), dim, y.layout());
  if (plan.outputs == 0) return;
  if constexpr (!std::is_integral_v<T>)
    if (plan.kept_rank > 0 && plan.reduced_x[0] >= plan.kept_x[plan.kept_rank - 1])
      return find_in_columns(x.data<T>(), y.data<T>(), plan, found);
  find_in_rows(x.data<T>(), y.data<T>(), plan, found);
}

}  // namespace

void max_backward_cpu(const Tensor& dx, const Tensor& dy, const Tensor& x, const Tensor& y, int dim) {
  dx.fill(0);
  const ReducePlan to = plan_dim(dx.layout(), dim, dy.layout());
  dispatch_floating(dx.dtype(), "max", [&]<class T>() {
    find<T>(x, y, dim, [&](int64_t output, int64_t place) {
      int64_t dx_offset, dy_offset;
      to.offsets(output, dx_offset, dy_offset);
      dx.data<T>()[dx_offset + place * to.reduced_x[0]] = dy.data<T>()[dy_offset];
    });
  });
}

void find_first_cpu(const Tensor& index, const Tensor& x, const Tensor& y, int dim) {
  dispatch_among<double, float, bf16, f16, int64_t, int32_t>(
      x.dtype(),
      [&]<class T>() {
        find<T>(x, y, dim,
                [to = index.data<int64_t>()](int64_t output, int64_t place) { to[output] = place; });
      },
      [] {});
}

}  // namespace tessera::ops
