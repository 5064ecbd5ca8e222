#pragma once

#include "gpu/row.cuh"
#include "ops/norm/norm_kernels.h"

/// What both directions of the norms share. They are bound by memory (a dozen operations against 4 to 12
/// bytes), so each row is read once, into registers, 16 bytes a thread and load: a row of up to 1024 elements
/// belongs to a warp, of up to 8192 to a block. Longer rows are read by a block once for each sum and once
/// more, mostly from the L2 cache.

namespace tessera::ops::norm_rows {

using gpu::ceil_div;
using gpu::kPackOf;
using gpu::kWarp;
using gpu::load_row;
using gpu::row_reduce;
using gpu::store_row;
using gpu::Sum;

inline constexpr int kBlock = 256;
inline constexpr int kWarps = kBlock / kWarp;

template <class T>
const T* data_or_null(const Tensor& tensor) {
  return tensor.defined() ? tensor.data<T>() : nullptr;
}

/// Whether packs of every row of `tensor` are whole; an undefined tensor does not hinder.
template <class T>
bool whole_rows(const Tensor& tensor) {
  return !tensor.defined() ||
         gpu::packs(tensor.data<T>(), tensor.rank() == 1 ? 0 : tensor.row_stride(), kPackOf<T>);
}

/// Row of this thread's warp or block in the grid's step `step`.
template <int kThreads>
__device__ __forceinline__ int64_t row_of(int64_t step) {
  const int64_t at = step * gridDim.x + blockIdx.x;
  return kThreads == kWarp ? at * kWarps + threadIdx.x / kWarp : at;
}

}  // namespace tessera::ops::norm_rows
