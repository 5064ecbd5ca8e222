#include <algorithm>

#include "gpu/dependent_launch.cuh"
#include "gpu/grid.cuh"
#include "ops/gather/gather_kernels.h"
#include "ops/triangle/triangle_kernels.h"
#include "tensor/elementwise.h"

/// A thread per element of y, which reads x's only where it stays: half a read and a write, bound by memory.

namespace tessera::ops {
namespace {

constexpr int kThreads = 256;

template <class Word>
__global__ void __launch_bounds__(kThreads)
    triangle_kernel(const StridedLoop<2> loop, Word* y, const Word* x, int64_t rows, int64_t columns,
                    const Triangle triangle) {
  gpu::wait_and_launch_dependents();
  for (int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x; i < loop.count;
       i += int64_t(gridDim.x) * kThreads) {
    const int64_t row = i / columns, column = i - row * columns;
    int64_t rest = i, y_offset = 0, x_offset = 0;
    for (int dim = loop.rank - 1; dim > 0; --dim) {
      const int64_t outer = rest / loop.sizes[dim], index = rest - outer * loop.sizes[dim];
      y_offset += index * loop.strides[0][dim], x_offset += index * loop.strides[1][dim];
      rest = outer;
    }
    y_offset += rest * loop.strides[0][0], x_offset += rest * loop.strides[1][0];
    y[y_offset] = triangle.keeps(row % rows, column) ? x[x_offset] : Word(0);
  }
}

}  // namespace

void triangle_cuda(const Tensor& y, const Tensor& x, const Triangle& triangle) {
  const Device device = y.device();
  const int64_t blocks =
      std::min<int64_t>(gpu::ceil_div(y.count(), kThreads), int64_t(device.multiprocessors()) * 32);
  dispatch_size(y.dtype(), [&]<class Word>() {
    gpu::launch_dependent(device, {gpu::grid_of(blocks), kThreads}, triangle_kernel<Word>,
                          make_loop(y.shape(), y, x), static_cast<Word*>(y.raw()),
                          static_cast<const Word*>(x.raw()), x.size(-2), x.size(-1), triangle);
  });
}

}  // namespace tessera::ops
