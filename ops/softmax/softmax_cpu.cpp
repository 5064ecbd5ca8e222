#include <cmath>
#include <limits>
#include <vector>

#include "ops/softmax/softmax_kernels.h"

namespace tessera::ops {
namespace {

constexpr int64_t kGrain = 4096;  // elements per block: about 10 us

/// body(begin, end) for pieces of the lines, on the CPU's threads.
template <int N, class Body>
void for_lines(const Lines<N>& lines, Body&& body) {
  parallel_for(lines.starts.count, std::max<int64_t>(1, kGrain / lines.length), body);
}

}  // namespace

void softmax_forward_cpu(const Tensor& y, const Tensor& x, int dim, bool log) {
  dispatch_floating(x.dtype(), log ? "log_softmax" : "softmax", [&]<class T>() {
    using C = Compute<T>;
    if (y.count() == 0) return;
    const auto lines = lines_along(dim, y, x);
    T* const to = y.data<T>();
    const T* const from = x.data<T>();
    for_lines(lines, [&](int64_t begin, int64_t end) {
      std::vector<C> line(size_t(lines.length));
      for (int64_t l = begin; l < end; ++l) {
        int64_t offset[2];
        lines.locate(l, offset);
        C top = -std::numeric_limits<C>::infinity();
        double sum = 0;
        for (int64_t i = 0; i < lines.length; ++i) {
          line[size_t(i)] = C(from[offset[1] + i * lines.strides[1]]);
          top = std::max(top, line[size_t(i)]);
        }
        for (C& value : line) {
          const C shifted = value - top, e = std::exp(shifted);
          sum += double(e);
          value = log ? shifted : e;
        }
        const C log_sum = C(std::log(sum)), inverse = C(1 / sum);
        for (int64_t i = 0; i < lines.length; ++i)
          to[offset[0] + i * lines.strides[0]] =
              T(log ? line[size_t(i)] - log_sum : line[size_t(i)] * inverse);
      }
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
    for_lines(lines, [&](int64_t begin, int64_t end) {
      for (int64_t l = begin; l < end; ++l) {
        int64_t offset[3];
        lines.locate(l, offset);
        const auto grad = [&](int64_t i) { return C(grads[offset[1] + i * lines.strides[1]]); };
        const auto result = [&](int64_t i) { return C(results[offset[2] + i * lines.strides[2]]); };
        double total = 0;
        for (int64_t i = 0; i < lines.length; ++i) total += double(log ? grad(i) : result(i) * grad(i));
        const C sum = C(total);
        for (int64_t i = 0; i < lines.length; ++i) {
          const C slope = log ? grad(i) - std::exp(result(i)) * sum : result(i) * (grad(i) - sum);
          to[offset[0] + i * lines.strides[0]] = T(slope);
        }
      }
    });
  });
}

}  // namespace tessera::ops
