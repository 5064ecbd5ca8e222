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
/// Lines that are computed together where their elements are neighbours, as along any dimension but the last:
/// a cache line of memory is then read once, not once per line.
constexpr int kTogether = 16;
constexpr int64_t kLongest = 1 << 16;  // elements of such lines

/// How many lines in a row are neighbours in every tensor; a multiple of that is the number of lines.
template <int N>
int64_t neighbours(const Lines<N>& lines) {
  const int last = lines.starts.rank - 1;
  const auto next_to_each_other = [&](const auto& strides) { return strides[last] == 1; };
  return last >= 0 && std::ranges::all_of(lines.starts.strides, next_to_each_other) ? lines.starts.sizes[last]
                                                                                    : 1;
}

/// body.template operator()<kLines>(offset, buffer) for kTogether lines at a time or one: `offset`: where the
/// first begins in each tensor; `buffer`: memory that calls may resize and share. On the CPU's threads.
template <class C, int N, class Body>
void for_lines(const Lines<N>& lines, Body&& body) {
  const int64_t row = lines.length <= kLongest ? neighbours(lines) : 1,
                most = row < kTogether ? 1 : kTogether, some = std::max<int64_t>(1, kGrain / lines.length),
                grain = round_up(some, most);
  parallel_for(lines.starts.count, grain, [&](int64_t begin, int64_t end) {
    std::vector<C> buffer;
    for (int64_t line = begin; line < end;) {
      int64_t offset[N];
      lines.locate(line, offset);
      if (line + kTogether <= end && line % row + kTogether <= row) {
        body.template operator()<kTogether>(offset, buffer);
        line += kTogether;
      } else {
        body.template operator()<1>(offset, buffer);
        ++line;
      }
    }
  });
}

/// `length` elements of kLines neighbouring lines in the arithmetic type, as they are in memory, and back.
template <int kLines, class T>
void load(Compute<T>* values, const T* from, int64_t length, int64_t stride) {
  if constexpr (kLines == 1) return widen(values, from, length, stride);
  for (int64_t i = 0; i < length; ++i) widen(values + i * kLines, from + i * stride, kLines);
}
template <int kLines, class T>
void store(T* to, const Compute<T>* values, int64_t length, int64_t stride) {
  if constexpr (kLines == 1) return narrow(to, values, length, stride);
  for (int64_t i = 0; i < length; ++i) narrow(to + i * stride, values + i * kLines, kLines);
}

/// sums += e^values of kLines lines, whose elements take turns; with `keeps` the values become their powers.
template <int kLines, class C>
void add_powers(double (&sums)[kLines], C* values, int64_t count, bool keeps) {
  constexpr int64_t kPiece = 64;
  static_assert(kPiece % kLines == 0);
  for (int64_t begin = 0; begin < count; begin += kPiece) {
    const int64_t some = std::min(kPiece, count - begin);
    C powers[kPiece];
    for (int64_t k = 0; k < some; ++k) powers[k] = exponential<false>(values[begin + k]);
    if constexpr (kLines == 1) {
      sums[0] += lane_sum<double>(some, [&](int64_t k) { return double(powers[k]); });
    } else {
      for (int64_t k = 0; k < some; ++k) sums[k % kLines] += double(powers[k]);
    }
    if (keeps) std::copy_n(powers, some, values + begin);
  }
}

}  // namespace

void softmax_forward_cpu(const Tensor& y, const Tensor& x, int dim, bool log) {
  dispatch_floating(x.dtype(), log ? "log_softmax" : "softmax", [&]<class T>() {
    using C = Compute<T>;
    if (y.count() == 0) return;
    const auto lines = lines_along(dim, y, x);
    T* const to = y.data<T>();
    const T* const from = x.data<T>();
    for_lines<C>(lines, [&]<int kLines>(const int64_t(&offset)[2], std::vector<C>& buffer) {
      buffer.resize(size_t(lines.length) * kLines);
      C* const values = buffer.data();
      load<kLines>(values, from + offset[1], lines.length, lines.strides[1]);
      C top[kLines], last[kLines];
      if constexpr (kLines == 1) {
        top[0] = lane_max(values, lines.length);
      } else {
        std::fill_n(top, kLines, -std::numeric_limits<C>::infinity());
        for (int64_t i = 0; i < lines.length; ++i)
          for (int j = 0; j < kLines; ++j) top[j] = std::max(top[j], values[i * kLines + j]);
      }
      for (int64_t i = 0; i < lines.length; ++i)
        for (int j = 0; j < kLines; ++j) values[i * kLines + j] -= top[j];
      double sums[kLines] = {};
      add_powers(sums, values, lines.length * kLines, !log);
      for (int j = 0; j < kLines; ++j) last[j] = C(log ? std::log(sums[j]) : 1 / sums[j]);
      for (int64_t i = 0; i < lines.length; ++i)
        for (int j = 0; j < kLines; ++j) {
          C& value = values[i * kLines + j];
          value = log ? value - last[j] : value * last[j];
        }
      store<kLines>(to + offset[0], values, lines.length, lines.strides[0]);
    });
  });
}

void softmax_backward_cpu(const Tensor& dx, const Tensor& dy, const Tensor& y, int dim, bool log) {
  dispatch_floating(y.dtype(), log ? "log_softmax" : "softmax", [&]<class T>() {
    using C = Compute<T>;
    if (dx.count() == 0) return;
    const auto lines = lines_along(dim, dx, dy, y);
    T* const to = dx.data<T>();
    const T *const grads = dy.data<T>(), *const results = y.data<T>();
    for_lines<C>(lines, [&]<int kLines>(const int64_t(&offset)[3], std::vector<C>& buffer) {
      const int64_t count = lines.length * kLines;
      buffer.resize(size_t(2 * count));
      C *const grad = buffer.data(), *const result = grad + count;
      load<kLines>(grad, grads + offset[1], lines.length, lines.strides[1]);
      load<kLines>(result, results + offset[2], lines.length, lines.strides[2]);
      C sum[kLines];
      if constexpr (kLines == 1) {
        sum[0] = C(
            lane_sum<double>(count, [=](int64_t i) { return double(log ? grad[i] : result[i] * grad[i]); }));
      } else {
        double total[kLines] = {};
        for (int64_t i = 0; i < count; i += kLines)
          for (int j = 0; j < kLines; ++j)
            total[j] += double(log ? grad[i + j] : result[i + j] * grad[i + j]);
        for (int j = 0; j < kLines; ++j) sum[j] = C(total[j]);
      }
      if (log)
        for (int64_t i = 0; i < count; ++i) result[i] = exponential<false>(result[i]);
      for (int64_t i = 0; i < count; i += kLines)
        for (int j = 0; j < kLines; ++j)
          grad[i + j] = log ? grad[i + j] - result[i + j] * sum[j] : result[i + j] * (grad[i + j] - sum[j]);
      store<kLines>(to + offset[0], grad, lines.length, lines.strides[0]);
    });
  });
}

}  // namespace tessera::ops
