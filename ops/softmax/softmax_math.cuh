#pragma once

#include "gpu/grid.cuh"
#include "gpu/row.cuh"
#include "ops/reduce/exponential.cuh"
#include "ops/softmax/softmax_kernels.h"

/// What the kernels of softmax share. Results of 16 bits use the approximate exp (`exponential`), whose error
/// does not show in them: with the library's the arithmetic is what the time goes to.

namespace tessera::ops::softmax_detail {

using gpu::ceil_div;
using gpu::kPackOf;
using gpu::kWarp;
using gpu::Max;
using gpu::RunningSoftmax;
using gpu::Sum;
using gpu::Words;

/// Rows of the forward pass (b unused) or the backward pass (a: dy, b: y).
template <class T>
struct Rows {
  T* to;
  const T* a;
  const T* b;
  int64_t to_stride, a_stride, b_stride, rows, width;
};

/// One element of dx.
template <class T, bool kLog>
__device__ __forceinline__ float slope(float dy, float y, float sum) {
  return kLog ? dy - exponential<T>(y) * sum : y * (dy - sum);
}

/// What the backward pass sums: dy of log_softmax, y dy of softmax.
template <bool kLog, int kSteps, class T>
__device__ __forceinline__ float sum_of(const Words<T> (&grads)[kSteps], const Words<T> (&results)[kSteps]) {
  float sum = 0;
#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
    float grad[kPackOf<T>], result[kPackOf<T>];
    gpu::unpack(grad, grads[s]);
    gpu::unpack(result, results[s]);
#pragma unroll
    for (int i = 0; i < kPackOf<T>; ++i) sum += kLog ? grad[i] : result[i] * grad[i];
  }
  return sum;
}

/// dx in place of dy.
template <bool kLog, int kSteps, class T>
__device__ __forceinline__ void slopes(Words<T> (&grads)[kSteps], const Words<T> (&results)[kSteps],
                                       float sum) {
#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
    float grad[kPackOf<T>], result[kPackOf<T>];
    gpu::unpack(grad, grads[s]);
    gpu::unpack(result, results[s]);
#pragma unroll
    for (int i = 0; i < kPackOf<T>; ++i) grad[i] = slope<T, kLog>(grad[i], result[i], sum);
    grads[s] = gpu::round_to_words<T>(grad);
  }
}

/// Rows that need not start on 16 bytes, but all operands' the same distance after; and narrow rows.
inline constexpr int kNarrow = 256;  // columns up to which a row belongs to as few lanes as hold it
template <class T>
void forward_any_rows(Device device, const Rows<T>& rows, bool log);
template <class T>
void backward_any_rows(Device device, const Rows<T>& rows, bool log);

/// Along a dimension that is not the last.
template <class T>
void forward_lines(const Tensor& y, const Tensor& x, int dim, bool log);
template <class T>
void backward_lines(const Tensor& dx, const Tensor& dy, const Tensor& y, int dim, bool log);

}  // namespace tessera::ops::softmax_detail
