#include <algorithm>
#include <cstring>

#include "gpu/dependent_launch.cuh"
#include "gpu/grid.cuh"
#include "ops/gather/gather_kernels.h"
#include "ops/indices.h"
#include "ops/take_along/take_along_kernels.h"
#include "tensor/elementwise.h"

/// take_along: a thread per element of y reads its index and the element that it names. Bound by memory: the
/// indices, y, and as many sectors of x as elements are taken from.
///
/// Its gradient: a thread per element of dx looks at all indices of its line, in order, and adds dy where
/// they name it. No thread writes what another one does, so there are no atomics, and the order is that of
/// the indices. The threads of a warp read the same index at once, mostly from the first cache; N
/// comparisons per element are below what memory takes for N up to some tens (numbers of classes, the k
/// largest), and cheaper than a sort for lines of up to some thousands (compares() in take_along.cpp).
///
/// one_hot: a thread per element of y, whose row's index is in the cache.

namespace tessera::ops {
namespace {

constexpr int kThreads = 256;

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

template <class T>
__global__ void __launch_bounds__(kThreads)
    put_kernel(T* dx, const T* dy, const Indices indices, int64_t count, int64_t length, int64_t n) {
  gpu::wait_and_launch_dependents();
  for (int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x; i < count;
       i += int64_t(gridDim.x) * kThreads) {
    const int64_t line = i / length, own = i - line * length, begin = line * n;
    float sum = 0;
#pragma unroll 4
    for (int64_t k = begin; k < begin + n; ++k)
      if (indices[k] == own) sum += float(dy[k]);
    dx[i] = T(sum);
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

void put_along_cuda(const Tensor& dx, const Tensor& dy, const Tensor& indices) {
  dispatch_floating_cuda(dx.dtype(), "take_along", [&]<class T>() {
    gpu::launch_dependent(dx.device(), grid_for(dx.device(), dx.count()), put_kernel<T>, dx.data<T>(),
                          dy.data<T>(), Indices(indices), dx.count(), dx.size(1), dy.size(1));
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
