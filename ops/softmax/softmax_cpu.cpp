#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "ops/activation/activation_math.h"
#include "ops/lane_sum_internal.h"
#include "ops/softmax/softmax_kernels.h"
#include "runtime/integers.h"
#include "tensor/convert.h"

namespace tessera::ops {
namespace {

constexpr int64_t kGrain = 4096;  // elements per block: about 10 us
/// Neighbouring lines, as they are along any dimension but the last, are computed side by side: loops along
/// the neighbours vectorise, and memory is read in pieces of up to kMost elements, fewer where there would be
/// less than kTiles of them for all threads.
constexpr int64_t kFewest = 16, kMost = 128, kTiles = 8;

/// How many lines in a row are neighbours in every tensor; a multiple of that is the number of lines.
template <int N>
int64_t neighbours(const Lines<N>& lines) {
  const int last = lines.starts.rank - 1;
  const auto next_to_each_other = [&](const auto& strides) { return strides[last] == 1; };
  return last >= 0 && std::ranges::all_of(lines.starts.strides, next_to_each_other) ? lines.starts.sizes[last]
                                                                                    : 1;
}

/// Calls side_by_side(offsets, width) for `width` <= kMost lines at a time, or alone(offsets, buffer) for
/// each: the offsets are where the first begins in each tensor; calls may resize and share the buffer. On the
/// CPU's threads.
template <class C, int N, class SideBySide, class Alone>
void for_lines(const Lines<N>& lines, SideBySide&& side_by_side, Alone&& alone) {
  const int64_t row = neighbours(lines), some = std::max<int64_t>(1, kGrain / lines.length);
  if (row < kFewest)
    return parallel_for(lines.starts.count, some, [&](int64_t begin, int64_t end) {
      std::vector<C> buffer;
      int64_t offsets[N];
      for (int64_t line = begin; line < end; ++line) {
        lines.locate(line, offsets);
        alone(offsets, buffer);
      }
    });
  const int64_t rows = lines.starts.count / row;
  int64_t width = kMost;
  while (width > kFewest && rows * ceil_div(row, width) < kTiles) width /= 2;
  const int64_t tiles = ceil_div(row, width);
  parallel_for(rows * tiles, ceil_div(some, width), [&](int64_t begin, int64_t end) {
    int64_t offsets[N];
    for (int64_t tile = begin; tile < end; ++tile) {
      const int64_t first = tile % tiles * width;
      lines.locate(tile / tiles * row + first, offsets);
      side_by_side(offsets, std::min(width, row - first));
    }
  });
}

/// A line in the arithmetic type: as it is in memory if that is packed in T = Compute<T>, else by way of a
/// buffer.
template <class T>
const Compute<T>* read_line(Compute<T>* buffer, const T* from, int64_t length, int64_t stride) {
  if constexpr (std::is_same_v<T, Compute<T>>)
    if (stride == 1) return from;
  widen(buffer, from, length, stride);
  return buffer;
}
/// Where to write one; `write_line` rounds what was written there.
template <class T>
Compute<T>* line_to_write(Compute<T>* buffer, T* to, int64_t stride) {
  if constexpr (std::is_same_v<T, Compute<T>>)
    if (stride == 1) return to;
  return buffer;
}
template <class T>
void write_line(T* to, const Compute<T>* line, int64_t length, int64_t stride) {
  if constexpr (std::is_same_v<T, Compute<T>>)
    if (line == to) return;
  narrow(to, line, length, stride);
}

template <bool kLog, class C>
void forward_line(C* y, const C* x, int64_t length) {
  const C top = lane_max(x, length);
  for (int64_t i = 0; i < length; ++i) y[i] = exponential<false>(x[i] - top);
  const double sum = lane_sum<double>(length, [=](int64_t i) { return double(y[i]); });
  if constexpr (kLog) {
    const C log_sum = C(std::log(sum));
    for (int64_t i = 0; i < length; ++i) y[i] = x[i] - top - log_sum;
  } else {
    const C inverse = C(1 / sum);
    for (int64_t i = 0; i < length; ++i) y[i] *= inverse;
  }
}

template <bool kLog, class C>
void backward_line(C* dx, const C* dy, const C* y, int64_t length) {
  const C sum = C(lane_sum<double>(length, [=](int64_t i) { return double(kLog ? dy[i] : y[i] * dy[i]); }));
  for (int64_t i = 0; i < length; ++i)
    dx[i] = kLog ? dy[i] - exponential<false>(y[i]) * sum : y[i] * (dy[i] - sum);
}

/// The same for `width` neighbouring lines, element by element of all of them.
template <bool kLog, class T>
void forward_lines(T* y, const T* x, int64_t length, int64_t width, int64_t y_stride, int64_t x_stride) {
  using C = Compute<T>;
  C top[kMost], last[kMost], buffer[kMost], powers[kMost];
  double sums[kMost];
  std::fill_n(top, width, -std::numeric_limits<C>::infinity());
  std::fill_n(sums, width, 0.0);
  for (int64_t i = 0; i < length; ++i) {
    const C* const from = read_line(buffer, x + i * x_stride, width, 1);
    for (int64_t j = 0; j < width; ++j) top[j] = from[j] > top[j] ? from[j] : top[j];
  }
  constexpr bool kKeeps = !kLog && std::is_same_v<T, C>;  // in y, unrounded
  for (int64_t i = 0; i < length; ++i) {
    const C* const from = read_line(buffer, x + i * x_stride, width, 1);
    C* to = powers;
    if constexpr (kKeeps) to = y + i * y_stride;
    for (int64_t j = 0; j < width; ++j) to[j] = exponential<false>(from[j] - top[j]);
    for (int64_t j = 0; j < width; ++j) sums[j] += double(to[j]);
  }
  for (int64_t j = 0; j < width; ++j) last[j] = C(kLog ? std::log(sums[j]) : 1 / sums[j]);
  for (int64_t i = 0; i < length; ++i) {
    T* const row = y + i * y_stride;
    C* const to = line_to_write(powers, row, 1);
    const C* const from = kKeeps ? to : read_line(buffer, x + i * x_stride, width, 1);
    for (int64_t j = 0; j < width; ++j)
      to[j] = kLog     ? from[j] - top[j] - last[j]
              : kKeeps ? from[j] * last[j]
                       : exponential<false>(from[j] - top[j]) * last[j];
    write_line(row, to, width, 1);
  }
}

template <bool kLog, class T>
void backward_lines(T* dx, const T* dy, const T* y, int64_t length, int64_t width,
                    const int64_t (&strides)[3]) {
  using C = Compute<T>;
  C grad_buffer[kMost], buffer[kMost], sum[kMost];
  double sums[kMost];
  std::fill_n(sums, width, 0.0);
  for (int64_t i = 0; i < length; ++i) {
    const C* const grads = read_line(grad_buffer, dy + i * strides[1], width, 1);
    const C* const results = kLog ? grads : read_line(buffer, y + i * strides[2], width, 1);
    for (int64_t j = 0; j < width; ++j) sums[j] += double(kLog ? grads[j] : results[j] * grads[j]);
  }
  for (int64_t j = 0; j < width; ++j) sum[j] = C(sums[j]);
  for (int64_t i = 0; i < length; ++i) {
    const C* const grads = read_line(grad_buffer, dy + i * strides[1], width, 1);
    const C* const results = read_line(buffer, y + i * strides[2], width, 1);
    C* const to = line_to_write(grad_buffer, dx + i * strides[0], 1);
    for (int64_t j = 0; j < width; ++j)
      to[j] = kLog ? grads[j] - exponential<false>(results[j]) * sum[j] : results[j] * (grads[j] - sum[j]);
    write_line(dx + i * strides[0], to, width, 1);
  }
}

/// f.template operator()<T, kLog>()
template <class F>
void dispatch(DType dtype, bool log, F&& f) {
  dispatch_floating(dtype, log ? "log_softmax" : "softmax", [&]<class T>() {
    log ? f.template operator()<T, true>() : f.template operator()<T, false>();
  });
}

}  // namespace

void softmax_forward_cpu(const Tensor& y, const Tensor& x, int dim, bool log) {
  dispatch(x.dtype(), log, [&]<class T, bool kLog>() {
    using C = Compute<T>;
    if (y.count() == 0) return;
    const auto lines = lines_along(dim, y, x);
    const auto [y_stride, x_stride] = lines.strides;
    const int64_t length = lines.length;
    T* const to = y.data<T>();
    const T* const from = x.data<T>();
    for_lines<C>(
        lines,
        [&](const auto& at, int64_t width) {
          forward_lines<kLog>(to + at[0], from + at[1], length, width, y_stride, x_stride);
        },
        [&](const auto& at, std::vector<C>& buffer) {
          buffer.resize(size_t(2 * length));
          C* const line = line_to_write(buffer.data(), to + at[0], y_stride);
          forward_line<kLog>(line, read_line(buffer.data() + length, from + at[1], length, x_stride), length);
          write_line(to + at[0], line, length, y_stride);
        });
  });
}

void softmax_backward_cpu(const Tensor& dx, const Tensor& dy, const Tensor& y, int dim, bool log) {
  dispatch(y.dtype(), log, [&]<class T, bool kLog>() {
    using C = Compute<T>;
    if (dx.count() == 0) return;
    const auto lines = lines_along(dim, dx, dy, y);
    const int64_t length = lines.length;
    T* const to = dx.data<T>();
    const T *const grads = dy.data<T>(), *const results = y.data<T>();
    for_lines<C>(
        lines,
        [&](const auto& at, int64_t width) {
          backward_lines<kLog>(to + at[0], grads + at[1], results + at[2], length, width, lines.strides);
        },
        [&](const auto& at, std::vector<C>& buffer) {
          buffer.resize(size_t(2 * length));
          C* const line = line_to_write(buffer.data(), to + at[0], lines.strides[0]);
          backward_line<kLog>(line, read_line(buffer.data(), grads + at[1], length, lines.strides[1]),
                              read_line(buffer.data() + length, results + at[2], length, lines.strides[2]),
                              length);
          write_line(to + at[0], line, length, lines.strides[0]);
        });
  });
}

}  // namespace tessera::ops
