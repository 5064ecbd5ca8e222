#pragma once

#include "gpu/pack.cuh"
#include "gpu/reduce.cuh"

/// What kernels that work on rows share: a row is held as packs of 16 bytes, converted to f32, and belongs to
/// a warp or to a block.

namespace tessera::gpu {

/// values = the elements first, first + 1, ... of a row of `width` elements, `fill` past its end. One load if
/// `whole` (gpu::packs of that row) and the pack lies inside the row: nothing past the row is touched.
template <int kPack, class T>
__device__ __forceinline__ void load_row(float (&values)[kPack], const T* row, int64_t first, int64_t width,
                                         bool whole, float fill) {
  if (whole && first + kPack <= width) {
    const Pack<T, kPack> pack = load_pack<kPack>(row + first);
#pragma unroll
    for (int i = 0; i < kPack; ++i) values[i] = float(pack.at[i]);
  } else {
#pragma unroll
    for (int i = 0; i < kPack; ++i) values[i] = first + i < width ? float(row[first + i]) : fill;
  }
}

/// The counterpart: rounds to T, writes what lies inside the row.
template <int kPack, class T>
__device__ __forceinline__ void store_row(T* row, int64_t first, int64_t width, bool whole,
                                          const float (&values)[kPack]) {
  if (whole && first + kPack <= width) {
    Pack<T, kPack> pack;
#pragma unroll
    for (int i = 0; i < kPack; ++i) pack.at[i] = T(values[i]);
    store_pack<kPack>(row + first, pack);
  } else {
#pragma unroll
    for (int i = 0; i < kPack; ++i)
      if (first + i < width) row[first + i] = T(values[i]);
  }
}

/// Combines the values of the threads that share a row: a warp (kThreads = 32) or the whole block; every
/// thread gets the result. `scratch` as in block_reduce; a warp does not use it.
template <class Op, int kThreads>
__device__ __forceinline__ float row_reduce(float value, float* scratch) {
  if constexpr (kThreads == kWarp) {
    return warp_reduce<Op>(value);
  } else {
    return block_reduce<Op>(value, scratch);
  }
}

/// The largest of the numbers seen and the sum of exp(x - largest), kept up to date while reading (Milakov,
/// Gimelshein, arXiv:1805.02867). Numbers of -inf add nothing, a NaN stays.
struct RunningSoftmax {
  float top = Max::kIdentity;
  float sum = 0;

  template <int kPack>
  __device__ __forceinline__ void add(const float (&values)[kPack]) {
    float now = top;
#pragma unroll
    for (int i = 0; i < kPack; ++i) now = Max{}(now, values[i]);
    const float base = now == Max::kIdentity ? 0.0f : now;
    sum *= expf(top - base);
#pragma unroll
    for (int i = 0; i < kPack; ++i) sum += expf(values[i] - base);
    top = now;
  }

  /// Of all threads that share the row; every thread gets the result.
  template <int kThreads>
  __device__ __forceinline__ RunningSoftmax of_row(float* scratch) const {
    RunningSoftmax all;
    all.top = row_reduce<Max, kThreads>(top, scratch);
    all.sum = row_reduce<Sum, kThreads>(top == Max::kIdentity ? 0.0f : sum * expf(top - all.top), scratch);
    return all;
  }
};

}  // namespace tessera::gpu
