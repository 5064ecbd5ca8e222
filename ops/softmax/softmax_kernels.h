#pragma once

#include "ops/softmax/softmax.h"
#include "tensor/elementwise.h"

namespace tessera::ops {

/// The 1-D slices ("lines") of N tensors of one shape along a dimension: element i of line l is at offset[n]
/// + i * strides[n] in tensor n, with the offsets of locate(l). Any layouts.
template <int N>
struct Lines {
  StridedLoop<N> starts;
  int64_t length = 0;
  int64_t strides[N] = {};

  TESSERA_HD void locate(int64_t line, int64_t (&offset)[N]) const {
    for (int n = 0; n < N; ++n) offset[n] = 0;
    for (int d = starts.rank - 1; d >= 0; --d) {
      const int64_t outer = line / starts.sizes[d], index = line - outer * starts.sizes[d];
      line = outer;
      for (int n = 0; n < N; ++n) offset[n] += index * starts.strides[n][d];
    }
  }
};

/// Of tensors that are not empty.
template <class... Tensors>
auto lines_along(int dim, const Tensors&... tensors) {
  constexpr int N = int(sizeof...(Tensors));
  const Tensor* const all[] = {&tensors...};
  Lines<N> lines;
  lines.length = all[0]->size(dim);
  for (int n = 0; n < N; ++n) lines.strides[n] = all[n]->layout().stride(dim);
  lines.starts = make_loop(all[0]->shape().without(dim), tensors.detach().select(dim, 0)...);
  return lines;
}

/// y = softmax of x along `dim`, or its logarithm.
void softmax_forward_cpu(const Tensor& y, const Tensor& x, int dim, bool log);
void softmax_forward_cuda(const Tensor& y, const Tensor& x, int dim, bool log);
/// dx from dy and the result y.
void softmax_backward_cpu(const Tensor& dx, const Tensor& dy, const Tensor& y, int dim, bool log);
void softmax_backward_cuda(const Tensor& dx, const Tensor& dy, const Tensor& y, int dim, bool log);

}  // namespace tessera::ops
