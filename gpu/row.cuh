#pragma once

#include "gpu/pack.cuh"
#include "gpu/reduce.cuh"
#include "tensor/tensor.h"

/// Shared by kernels that work on rows: a row is held as packs of 16 bytes, converted to f32, and belongs to
/// a group of lanes, a warp or a block.

namespace tessera::gpu {

/// values = the elements first, first + 1, ... of a row of `width` elements, `fill` past its end. One load if
/// `whole` (is_pack_aligned of that row) and the pack lies inside the row: nothing past the row is accessed.
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

/// The counterpart of load_row: rounds to T and writes the elements inside the row.
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

/// First column of words s of a thread's share of a row (of a piece of a row) that kThreads threads hold.
template <class T, int kThreads>
__device__ __forceinline__ int column_of(int s, int rank) {
  return (s * kThreads + rank) * kPackOf<T>;
}

/// `x`, or a copy of it whose rows are aligned for packs. Rows shorter than a pack need no alignment: x is
/// returned as it is. An undefined tensor stays undefined.
template <class T>
Tensor pack_aligned_or_copy(const Tensor& x) {
  if (!x.defined() || x.row_length() < kPackOf<T>) return x;
  return is_pack_aligned(x.data<T>(), x.rows() == 1 ? 0 : x.row_stride(), kPackOf<T>) ? x : x.clone();
}

/// A thread's share of a row that is held in registers, as it is in memory: words s of thread `rank` are
/// the elements from column_of<T, kThreads>(s, rank) on; 0 past the row's end. All loads are independent but
/// for those of the ragged end; nothing past the row is accessed. Rows must be as pack_aligned_or_copy
/// returns them; with kThreads = 1 one thread has a whole row shorter than a pack.
template <int kThreads>
struct RowAccess {
  template <int kSteps, class T>
  static __device__ __forceinline__ void load(Words<T> (&share)[kSteps], const T* row, int rank, int width) {
    constexpr int kPack = kPackOf<T>;
    if constexpr (kThreads == 1) {
      share[0] = load_part(row, width);
    } else {
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        const int first = column_of<T, kThreads>(s, rank);
        share[s] = {};
        if (first + kPack <= width) share[s] = load_words(row + first);
      }
      const int tail = width / kPack, left = width % kPack;
      if (left == 0 || tail % kThreads != rank) return;
      const Words<T> part = load_tail(row + tail * kPack, left);
#pragma unroll
      for (int s = 0; s < kSteps; ++s) share[s] = select(s == tail / kThreads, part, share[s]);
    }
  }

  template <int kSteps, class T>
  static __device__ __forceinline__ void store(T* row, const Words<T> (&share)[kSteps], int rank, int width) {
    constexpr int kPack = kPackOf<T>;
    if constexpr (kThreads == 1) {
      store_part(row, share[0], width);
    } else {
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        const int first = column_of<T, kThreads>(s, rank);
        if (first + kPack <= width) store_words(row + first, share[s]);
      }
      const int tail = width / kPack, left = width % kPack;
      if (left == 0 || tail % kThreads != rank) return;
      Words<T> part;
#pragma unroll
      for (int s = 0; s < kSteps; ++s) part = select(s == tail / kThreads, share[s], part);
      store_tail(row + tail * kPack, part, left);
    }
  }

  /// A vector of the row's width that all rows share; all elements are `otherwise` if it is null.
  template <int kSteps, class T>
  static __device__ __forceinline__ void load_vector(Words<T> (&share)[kSteps], const T* vector,
                                                     float otherwise, int rank, int width) {
    if (vector) return load(share, vector, rank, width);
    float values[kPackOf<T>];
#pragma unroll
    for (int i = 0; i < kPackOf<T>; ++i) values[i] = otherwise;
#pragma unroll
    for (int s = 0; s < kSteps; ++s) share[s] = round_to_words<T>(values);
  }
};

/// visit(base, columns) for the pieces of a row that is too long to be held at once.
template <int kChunk, class Visit>
__device__ __forceinline__ void for_chunks(int64_t width, Visit&& visit) {
  for (int64_t base = 0; base < width; base += kChunk) visit(base, int(min(width - base, int64_t(kChunk))));
}

/// Rows that a block processes at a time if kThreads (1, lanes of a warp, a warp or the block) share a row.
template <int kThreads>
__host__ __device__ constexpr int rows_at_once(int block) {
  return kThreads <= kWarp ? block / kThreads : 1;
}
/// The first row of this thread in a grid-stride loop over the rows, and the stride of that loop.
template <int kThreads>
__device__ __forceinline__ int64_t first_row() {
  return kThreads <= kWarp
             ? blockIdx.x * int64_t(rows_at_once<kThreads>(int(blockDim.x))) + threadIdx.x / kThreads
             : int64_t(blockIdx.x);
}
template <int kThreads>
__device__ __forceinline__ int64_t row_step() {
  return gridDim.x * int64_t(rows_at_once<kThreads>(int(blockDim.x)));
}

/// Sums (or Op) over the threads that share a row (one, a group of lanes, a warp, or the whole block of
/// kThreads) of up to kValues values at once: one barrier per call, since calls alternate between two buffers
/// in shared memory. Every thread gets the result; the order is fixed. The groups of a warp need not call it
/// together.
template <int kThreads, int kValues>
class RowReduce {
 public:
  static constexpr int kScratch = kThreads <= kWarp ? 1 : 2 * kValues * (kThreads / kWarp);
  __device__ explicit RowReduce(float* scratch) : scratch_(scratch) {}

  template <class Op = Sum, int kCount>
  __device__ __forceinline__ void operator()(float (&values)[kCount], Op op = {}) {
    static_assert(kCount <= kValues);
    constexpr int kLanes = kThreads < kWarp ? kThreads : kWarp;
    if constexpr (kLanes > 1)
#pragma unroll
      for (int v = 0; v < kCount; ++v)
        values[v] = warp_reduce<Op, kLanes>(values[v], op, group_lanes<kLanes>());
    if constexpr (kThreads > kWarp) {
      constexpr int kWarps = kThreads / kWarp;
      float* const place = scratch_ + slot_ * (kValues * kWarps);
      slot_ ^= 1;
      if (threadIdx.x % kWarp == 0)
#pragma unroll
        for (int v = 0; v < kCount; ++v) place[v * kWarps + int(threadIdx.x) / kWarp] = values[v];
      __syncthreads();
#pragma unroll
      for (int v = 0; v < kCount; ++v) {
        values[v] = place[v * kWarps];
#pragma unroll
        for (int w = 1; w < kWarps; ++w) values[v] = op(values[v], place[v * kWarps + w]);
      }
    }
  }

 private:
  float* scratch_;
  int slot_ = 0;
};

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

/// Online softmax: the running maximum `top` and the sum of exp(x - top) (Milakov, Gimelshein,
/// arXiv:1805.02867). Values of -inf add nothing, a NaN stays.
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

  /// Combines those of all threads that share the row; every thread gets the result.
  template <int kThreads>
  __device__ __forceinline__ RunningSoftmax reduce_row(float* scratch) const {
    RunningSoftmax all;
    all.top = row_reduce<Max, kThreads>(top, scratch);
    all.sum = row_reduce<Sum, kThreads>(top == Max::kIdentity ? 0.0f : sum * expf(top - all.top), scratch);
    return all;
  }
};

}  // namespace tessera::gpu
