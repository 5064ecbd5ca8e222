#include "gpu/launch.cuh"
#include "ops/mlp/move_columns.h"
#include "tensor/dtype.h"

/// An element per thread and step; bound by the 32-byte sectors that scattered columns touch. Threads of a
/// warp walk along the dimension in which x's elements are neighbours: the rows of a transposed view, else
/// the indices, which ascend.

namespace tessera::ops {
namespace {

constexpr int kFast = 32, kSlow = 8;

template <class T, Move kHow, bool kRowsFirst>
__global__ void __launch_bounds__(kFast* kSlow)
    move_kernel(T* x, int64_t x_down, int64_t x_across, T* part, int64_t down, int64_t across,
                const int* indices, int64_t rows, int64_t columns, int64_t x_columns) {
  const int64_t fast = int64_t(blockIdx.x) * kFast + threadIdx.x % kFast;
  const int64_t fast_end = kRowsFirst ? rows : columns, slow_end = kRowsFirst ? columns : rows;
  if (fast >= fast_end) return;
  for (int64_t slow = int64_t(blockIdx.y) * kSlow + threadIdx.x / kFast; slow < slow_end;
       slow += int64_t(gridDim.y) * kSlow) {
    const int64_t row = kRowsFirst ? fast : slow, i = kRowsFirst ? slow : fast;
    const int64_t index = indices[i];
    if (index < 0 || index >= x_columns) continue;
    T& there = x[row * x_down + index * x_across];
    T& here = part[row * down + i * across];
    if constexpr (kHow == Move::add) {
      there = T(float(there) + float(here));
    } else {
      here = there;
      if constexpr (kHow == Move::take_and_clear) there = T(0.0f);
    }
  }
}

template <class T, Move kHow, bool kRowsFirst>
void launch(const Tensor& x, const Tensor& part, const Tensor& indices) {
  const int64_t rows = part.size(0), columns = part.size(1);
  const int64_t fast = kRowsFirst ? rows : columns, slow = kRowsFirst ? columns : rows;
  gpu::launch(x.device(),
              {.grid = dim3(unsigned(gpu::ceil_div(fast, kFast)),
                            unsigned(std::min<int64_t>(gpu::ceil_div(slow, 4 * kSlow), 65535))),
               .block = dim3(kFast * kSlow)},
              move_kernel<T, kHow, kRowsFirst>, x.data<T>(), x.layout().stride(0), x.layout().stride(1),
              part.data<T>(), part.layout().stride(0), part.layout().stride(1), indices.data<int32_t>(), rows,
              columns, x.size(1));
}

template <class T, Move kHow>
void run(const Tensor& x, const Tensor& part, const Tensor& indices) {
  if (x.layout().stride(0) == 1 && x.layout().stride(1) != 1)
    launch<T, kHow, true>(x, part, indices);
  else
    launch<T, kHow, false>(x, part, indices);
}

}  // namespace

void move_columns_cuda(const Tensor& x, const Tensor& part, const Tensor& indices, Move how) {
  dispatch_floating_cuda(x.dtype(), "columns", [&]<class T>() {
    if (how == Move::take)
      run<T, Move::take>(x, part, indices);
    else if (how == Move::take_and_clear)
      run<T, Move::take_and_clear>(x, part, indices);
    else
      run<T, Move::add>(x, part, indices);
  });
}

}  // namespace tessera::ops
