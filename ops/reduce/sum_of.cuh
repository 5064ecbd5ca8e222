#pragma once

#include "ops/reduce/reduce_pass.cuh"

namespace tessera::ops {
namespace {

/// Sums, an operator of reduce_pass.cuh. They are f64, as on the CPU: a long sum that cancels stays right. An
/// addition in f64 per element is below what memory takes, but a conversion to f64 is not (16 per clock and
/// SM), so up to eight neighbours of 16 bits, or terms made of such, are added in f32 first. Of elements
/// whose magnitudes are within a factor of 2^10 (f16) or 2^13 (bf16) that is exact; otherwise it is off by at
/// most 3 2^-24 of the sum of their magnitudes, where the elements themselves were rounded by 2^-11 or 2^-8.
/// Eighths are added, so that nothing overflows that f64 would hold.
struct SumOf {
  using Acc = double;
  template <class T>
  using Partial = double;
  static constexpr bool kOrdered = false;
  static __device__ double identity() { return 0; }
  static __device__ double combine(double a, double b) { return a + b; }
  template <class T>
  __device__ double add(double all, T x, int64_t) const {
    return all + double(x);
  }
  template <class T>
  static constexpr bool kJoins = sizeof(T) == 2;
  template <int kCount>
  __device__ __forceinline__ double join(double all, const float (&few)[kCount]) const {
    static_assert(kCount <= 8);
    float sums[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) sums[i] = 0.125f * few[i];
#pragma unroll
    for (int half = kCount / 2; half > 0; half /= 2)
#pragma unroll
      for (int i = 0; i < half; ++i) sums[i] += sums[i + half];
    return fma(8.0, double(sums[0]), all);
  }
  SumOf rest() const {
    return {};
  }
  template <class Out>
  __device__ void store(Out* y, int64_t at, int64_t, double sum, Finish how) const {
    if constexpr (std::is_same_v<Out, double>) {
      y[at] = sum;
    } else {
      const double mean = sum * how.share;
      if (!how.root)
        y[at] = Out(float(mean));
      else if constexpr (sizeof(Out) == 2)
        y[at] = Out(sqrtf(float(mean)));
      else
        y[at] = Out(float(::sqrt(mean)));
    }
  }
};

}  // namespace
}  // namespace tessera::ops
