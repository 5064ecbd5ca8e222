#pragma once

#include "gpu/row.cuh"
#include "ops/indices.h"
#include "ops/reduce/exponential.cuh"

/// One row of logits: what its threads read, sum and write.

namespace tessera::ops {

template <class T>
struct CrossEntropyRows {
  const T* logits;
  Indices targets;
  int64_t stride, rows, classes, ignored;
  bool whole;  // rows of logits and of their gradient may be read in packs
  float smoothing;

  __device__ bool counts(int64_t target) const { return target != ignored; }
  __device__ bool valid(int64_t target) const { return 0 <= target && target < classes; }
};

/// The largest logit and the sum of exp(x - largest), kept up to date while reading (Milakov, Gimelshein,
/// arXiv:1805.02867). Of -inf nothing is added, a NaN makes the sum NaN. With kSmooth also the sum of the
/// logits above `origin`, the row's first, so that their mean keeps its digits.
template <class T, bool kSmooth>
struct RowSums {
  float top = -INFINITY, sum = 0, offsets = 0;

  /// `count`: of the values that are logits; the others are -inf.
  template <int N>
  __device__ __forceinline__ void add(const float (&values)[N], int count, float origin) {
    float now = top;
#pragma unroll
    for (int i = 0; i < N; ++i) now = fmaxf(now, values[i]);
    const float base = now == -INFINITY ? 0.0f : now;
    sum *= exponential<T>(top - base);
#pragma unroll
    for (int i = 0; i < N; ++i) sum += exponential<T>(values[i] - base);
    top = now;
    if constexpr (kSmooth)
#pragma unroll
      for (int i = 0; i < N; ++i)
        if (i < count) offsets += values[i] - origin;
  }

  /// Of all threads of the row; every thread gets the result.
  template <int kThreads>
  __device__ __forceinline__ void join(float* scratch) {
    const float all = reduce<gpu::Max, kThreads>(top, scratch);
    sum = reduce<gpu::Sum, kThreads>(all == -INFINITY ? sum : sum * exponential<T>(top - all), scratch);
    if constexpr (kSmooth) offsets = reduce<gpu::Sum, kThreads>(offsets, scratch);
    top = all;
  }

  /// The loss of a row, whose target's logit is `chosen`; log_sum is that of exp(x - top).
  __device__ __forceinline__ float loss(float log_sum, float chosen, float origin, float smoothing,
                                        int64_t classes) const {
    const float own = log_sum - (chosen - top);
    if constexpr (!kSmooth) return own;
    const float mean = offsets / float(classes);
    return (1.0f - smoothing) * own + smoothing * (log_sum + ((top - origin) - mean));
  }

 private:
  template <class Op, int kThreads>
  static __device__ __forceinline__ float reduce(float value, float* scratch) {
    if constexpr (kThreads <= gpu::kWarp) {
      return gpu::warp_reduce<Op, kThreads>(value);
    } else {
      return gpu::block_reduce<Op>(value, scratch);
    }
  }
};

/// Logits of a pack become their gradients g (p - off), the target's g (p - on); `first` is the pack's class.
template <class T, int kPack>
__device__ __forceinline__ void row_gradient(float (&values)[kPack], float top, float log_sum, float g,
                                             float on, float off, int64_t first, int64_t target) {
  const int own = target >= first && target < first + kPack ? int(target - first) : -1;
#pragma unroll
  for (int i = 0; i < kPack; ++i)
    values[i] = g * (exponential<T>(values[i] - top - log_sum) - (i == own ? on : off));
}

}  // namespace tessera::ops
