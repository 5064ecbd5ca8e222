#include <algorithm>
#include <cstring>

#include "gpu/dependent_launch.cuh"
#include "gpu/grid.cuh"
#include "gpu/pack.cuh"
#include "ops/gather/gather_kernels.h"
#include "ops/indices.h"
#include "ops/take_along/take_along_kernels.h"
#include "tensor/elementwise.h"

/// take_along: a thread per element of y reads its index and the element that it names. Bound by memory: the
/// indices, y, and as many sectors of x as elements are taken from.
///
/// Its gradient, without atomics, adds up dy of the same index in their order:
///   sum_lines   Lines of up to kMostSummed elements: a warp sums a line in f32 in shared memory, 32 indices
///               at a time, of which the first lane with an index adds those of all, and writes it once.
///   put_kernel  Longer ones: dx is zero, and a thread per index, with those of its line in shared memory,
///               adds up dy where the same index comes again if no earlier one is the same. N comparisons per
///               index cost less than a sort up to kMostCompared.
///
/// one_hot: a thread per element of y, whose row's index is in the cache.

namespace tessera::ops {
namespace {

constexpr int kThreads = 256;
constexpr int kMostCompared = 2048;  // indices of a line that a block holds
constexpr int kMostSummed = 1024;    // elements of a line that a warp holds

gpu::LaunchShape grid_for(Device device, int64_t threads) {
  const int64_t blocks =
      std::min<int64_t>(gpu::ceil_div(threads, kThreads), int64_t(device.multiprocessors()) * 32);
  return {gpu::grid_of(blocks), kThreads};
}

/// The offsets of element i of a loop, in row-major order.
template <int N>
__device__ __forceinline__ void offsets_of(const StridedLoop<N>& loop, int64_t i, int64_t (&offset)[N]) {
#pragma unroll
  for (int n = 0; n < N; ++n) offset[n] = 0;
  for (int dim = loop.rank - 1; dim > 0; --dim) {
    const int64_t rest = i / loop.sizes[dim], index = i - rest * loop.sizes[dim];
#pragma unroll
    for (int n = 0; n < N; ++n) offset[n] += index * loop.strides[n][dim];
    i = rest;
  }
#pragma unroll
  for (int n = 0; n < N; ++n) offset[n] += i * loop.strides[n][0];
}

/// loop: y, the indices, and x without its dimension of `length` elements, which are `stride` apart.
template <class Word, class Index>
__global__ void __launch_bounds__(kThreads)
    take_kernel(const StridedLoop<3> loop, Word* y, const Index* indices, const Word* x, int64_t length,
                int64_t stride) {
  gpu::wait_and_launch_dependents();
  for (int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x; i < loop.count;
       i += int64_t(gridDim.x) * kThreads) {
    int64_t offset[3];
    offsets_of(loop, i, offset);
    const auto at = int64_t(indices[offset[1]]);
    y[offset[0]] = at >= 0 && at < length ? x[offset[2] + at * stride] : Word(~Word(0));
  }
}

/// Shared memory: a line per warp.
template <class T>
__global__ void __launch_bounds__(kThreads)
    sum_lines(T* dx, const T* dy, const Indices indices, int64_t lines, int length, int n) {
  extern __shared__ __align__(16) float sums[];
  constexpr unsigned kAll = 0xFFFFFFFFu;
  constexpr int kPack = gpu::kPackOf<T>, kWarp = gpu::kWarp;
  gpu::wait_and_launch_dependents();
  const int warp = int(threadIdx.x) / kWarp, lane = int(threadIdx.x) % kWarp;
  const int64_t line = int64_t(blockIdx.x) * (kThreads / kWarp) + warp, begin = line * n;
  if (line >= lines) return;
  float* const own = sums + warp * length;
  for (int i = lane; i < length; i += kWarp) own[i] = 0;
  __syncwarp();
  for (int k = lane; k - lane < n; k += kWarp) {
    const int64_t at = k < n ? indices[begin + k] : -1;
    const bool inside = at >= 0 && at < length;
    const float value = inside ? float(dy[begin + k]) : 0.0f;
    unsigned same = __match_any_sync(kAll, inside ? int(at) : -1 - lane);  // lanes, this one included
    const bool adds = inside && __ffs(int(same)) - 1 == lane;
    float sum = adds ? own[at] : 0.0f;
    while (__any_sync(kAll, same != 0)) {
      const float next = __shfl_sync(kAll, value, same != 0 ? __ffs(int(same)) - 1 : 0);
      if (same != 0) sum += next;
      same &= same - 1;
    }
    if (adds) own[at] = sum;
    __syncwarp();
  }
  T* const to = dx + line * length;
  if (length % kPack == 0) {
    for (int first = lane * kPack; first < length; first += kWarp * kPack) {
      float values[kPack];
#pragma unroll
      for (int i = 0; i < kPack; ++i) values[i] = own[first + i];
      gpu::store_words(to + first, gpu::round_to_words<T>(values));
    }
  } else {
    for (int i = lane; i < length; i += kWarp) to[i] = T(own[i]);
  }
}

/// dx [lines, length] is zero. `across` threads have a line.
template <class T>
__global__ void __launch_bounds__(kThreads)
    put_kernel(T* dx, const T* dy, const Indices indices, int64_t lines, int64_t length, int n, int across) {
  __shared__ int64_t staged[kMostCompared];
  gpu::wait_and_launch_dependents();
  const int group = int(threadIdx.x) / across, lane = int(threadIdx.x) % across;
  const int64_t line = int64_t(blockIdx.x) * (kThreads / across) + group, begin = line * n;
  int64_t* const own = staged + group * n;
  if (line < lines)
    for (int k = lane; k < n; k += across) own[k] = indices[begin + k];
  __syncthreads();
  if (line >= lines) return;
  for (int k = lane; k < n; k += across) {
    const int64_t at = own[k];
    if (at < 0 || at >= length) continue;
    bool first = true;
    float sum = 0;
    for (int j = 0; j < n; ++j) {
      if (own[j] != at) continue;
      first = first && j >= k;
      if (first) sum += float(dy[begin + j]);
    }
    if (first) dx[line * length + at] = T(sum);
  }
}

template <class Index>
__global__ void __launch_bounds__(kThreads)
    number_kernel(int64_t* numbers, const Index* indices, int64_t count, int64_t length, int64_t n) {
  gpu::wait_and_launch_dependents();
  for (int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x; i < count;
       i += int64_t(gridDim.x) * kThreads) {
    const auto at = int64_t(indices[i]);
    numbers[i] = at >= 0 && at < length ? i / n * length + at : -1;
  }
}

/// The largest n of each index: which of several threads comes last does not matter.
template <class Index>
__global__ void __launch_bounds__(kThreads)
    last_kernel(long long* last, const Index* indices, int64_t count, int64_t length, int64_t n) {
  gpu::wait_and_launch_dependents();
  for (int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x; i < count;
       i += int64_t(gridDim.x) * kThreads) {
    const auto at = int64_t(indices[i]);
    if (at >= 0 && at < length) atomicMax(&last[i / n * length + at], (long long)(i % n));
  }
}

template <class Word, class Index>
__global__ void __launch_bounds__(kThreads)
    last_gradient_kernel(Word* dsrc, const Word* dy, const int64_t* last, const Index* indices, int64_t count,
                         int64_t length, int64_t n) {
  gpu::wait_and_launch_dependents();
  for (int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x; i < count;
       i += int64_t(gridDim.x) * kThreads) {
    const auto at = int64_t(indices[i]);
    const int64_t place = i / n * length + at;
    dsrc[i] = at >= 0 && at < length && last[place] == i % n ? dy[place] : Word(0);
  }
}

/// loop: y, and the indices repeated along its last dimension, the classes. `one`: the bits of 1.
template <class Word, class Index>
__global__ void __launch_bounds__(kThreads)
    one_hot_kernel(const StridedLoop<2> loop, Word* y, const Index* indices, int64_t classes, Word one) {
  gpu::wait_and_launch_dependents();
  for (int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x; i < loop.count;
       i += int64_t(gridDim.x) * kThreads) {
    int64_t offset[2];
    offsets_of(loop, i, offset);
    y[offset[0]] = int64_t(indices[offset[1]]) == i % classes ? one : Word(0);
  }
}

}  // namespace

void take_along_cuda(const Tensor& y, const Tensor& x, const Tensor& indices, int dim) {
  Layout lines = x.layout();  // without the dimension
  lines.shape = lines.shape.with(dim, 1);
  const StridedLoop<3> loop = make_loop<3>(y.shape(), {&y.layout(), &indices.layout(), &lines});
  dispatch_size(y.dtype(), [&]<class Word>() {
    dispatch_index(indices.dtype(), "take_along", [&]<class Index>() {
      gpu::launch_dependent(y.device(), grid_for(y.device(), loop.count), take_kernel<Word, Index>, loop,
                            static_cast<Word*>(y.raw()), indices.data<Index>(),
                            static_cast<const Word*>(x.raw()), x.size(dim), x.layout().stride(dim));
    });
  });
}

bool put_along_compares(int64_t n) {
  return n <= kMostCompared;
}

void put_along_cuda(const Tensor& dx, const Tensor& dy, const Tensor& indices) {
  const int n = int(dy.size(1));
  if (dx.size(1) <= kMostSummed) {
    const int length = int(dx.size(1)), warps = kThreads / gpu::kWarp;
    return dispatch_floating_cuda(dx.dtype(), "take_along", [&]<class T>() {
      gpu::launch_dependent(dx.device(),
                            {.grid = gpu::grid_of(gpu::ceil_div(dx.size(0), warps)),
                             .block = kThreads,
                             .shared_bytes = size_t(warps) * size_t(length) * sizeof(float)},
                            sum_lines<T>, dx.data<T>(), dy.data<T>(), Indices(indices), dx.size(0), length,
                            n);
    });
  }
  dx.fill(0);
  const int across = n <= kMostCompared * gpu::kWarp / kThreads ? gpu::kWarp : kThreads;
  if (n == 0) return;
  const int64_t blocks = gpu::ceil_div(dx.size(0), kThreads / across);
  dispatch_floating_cuda(dx.dtype(), "take_along", [&]<class T>() {
    gpu::launch_dependent(dx.device(), {gpu::grid_of(blocks), kThreads}, put_kernel<T>, dx.data<T>(),
                          dy.data<T>(), Indices(indices), dx.size(0), dx.size(1), n, across);
  });
}

void last_along_cuda(const Tensor& last, const Tensor& indices) {
  last.fill(-1);
  if (indices.count() == 0) return;
  dispatch_index(indices.dtype(), "scatter", [&]<class Index>() {
    gpu::launch_dependent(last.device(), grid_for(last.device(), indices.count()), last_kernel<Index>,
                          static_cast<long long*>(last.raw()), indices.data<Index>(), indices.count(),
                          last.size(1), indices.size(1));
  });
}

void last_gradient_cuda(const Tensor& dsrc, const Tensor& dy, const Tensor& last, const Tensor& indices) {
  dispatch_size(dsrc.dtype(), [&]<class Word>() {
    dispatch_index(indices.dtype(), "scatter", [&]<class Index>() {
      gpu::launch_dependent(dsrc.device(), grid_for(dsrc.device(), dsrc.count()),
                            last_gradient_kernel<Word, Index>, static_cast<Word*>(dsrc.raw()),
                            static_cast<const Word*>(dy.raw()), last.data<int64_t>(), indices.data<Index>(),
                            dsrc.count(), last.size(1), dsrc.size(1));
    });
  });
}

void number_in_lines_cuda(const Tensor& numbers, const Tensor& indices, int64_t length) {
  dispatch_index(indices.dtype(), "take_along", [&]<class Index>() {
    gpu::launch_dependent(numbers.device(), grid_for(numbers.device(), numbers.count()), number_kernel<Index>,
                          numbers.data<int64_t>(), indices.data<Index>(), numbers.count(), length,
                          indices.size(1));
  });
}

void one_hot_cuda(const Tensor& y, const Tensor& indices) {
  const int64_t classes = y.size(-1);
  Layout rows = y.layout();
  rows.shape = y.shape().with(-1, 1);
  for (int dim = 0; dim < indices.rank(); ++dim) rows.strides[size_t(dim)] = indices.layout().stride(dim);
  const StridedLoop<2> loop = make_loop<2>(y.shape(), {&y.layout(), &rows});
  dispatch_any(y.dtype(), [&]<class T>() {
    const T value = convert<T>(1.0);
    dispatch_size(y.dtype(), [&]<class Word>() {
      if constexpr (sizeof(Word) == sizeof(T)) {
        Word one;
        std::memcpy(&one, &value, sizeof one);
        dispatch_index(indices.dtype(), "one_hot", [&]<class Index>() {
          gpu::launch_dependent(y.device(), grid_for(y.device(), loop.count), one_hot_kernel<Word, Index>,
                                loop, static_cast<Word*>(y.raw()), indices.data<Index>(), classes, one);
        });
      }
    });
  });
}

}  // namespace tessera::ops
