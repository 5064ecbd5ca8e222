#include "gpu/elementwise.cuh"
#include "gpu/launch.cuh"
#include "gpu/pack.cuh"
#include "ops/activation/activation_math.h"
#include "ops/linear/activation_of_result.h"
#include "ops/linear/linear_activation_kernels.h"

/// Counts of the elements of each column that are not zero: one read per element, bound by memory. A thread
/// takes a pack of neighbouring columns (16 bytes where rows are aligned for it) and every 8th row of its
/// block's chunk; the 8 counts of a column are added through shared memory and then to those of the other
/// chunks by integer atomics, whose sums depend on no order.

namespace tessera::ops {
namespace {

constexpr int kLanes = 32, kWays = 8;  // a block: packs of a row, rows at once

template <class T, int kPack>
__global__ void __launch_bounds__(kLanes* kWays)
    column_counts_kernel(int* counts, const T* x, int64_t rows, int64_t columns, int64_t down, int64_t across,
                         int64_t rows_per_chunk) {
  __shared__ int partial[kWays][kLanes * kPack];
  const int lane = int(threadIdx.x) % kLanes, way = int(threadIdx.x) / kLanes;
  const int64_t first = int64_t(blockIdx.x) * (kLanes * kPack), column = first + lane * kPack;
  const int64_t begin = int64_t(blockIdx.y) * rows_per_chunk, end = min(rows, begin + rows_per_chunk);
  int found[kPack] = {};
  if (column < columns) {
#pragma unroll 4
    for (int64_t row = begin + way; row < end; row += kWays) {
      const T* const from = x + row * down + column * across;
      if (kPack > 1 && column + kPack <= columns) {
        const auto pack = gpu::load_pack<kPack>(from);
#pragma unroll
        for (int i = 0; i < kPack; ++i) found[i] += float(pack.at[i]) != 0;
      } else {
#pragma unroll
        for (int i = 0; i < kPack; ++i)
          if (column + i < columns) found[i] += float(from[i * across]) != 0;
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kPack; ++i) partial[way][lane * kPack + i] = found[i];
  __syncthreads();
  for (int i = int(threadIdx.x); i < kLanes * kPack && first + i < columns; i += kLanes * kWays) {
    int total = 0;
#pragma unroll
    for (int w = 0; w < kWays; ++w) total += partial[w][i];
    if (total) atomicAdd(counts + first + i, total);
  }
}

template <class T, int kPack>
void launch(const Tensor& counts, const Tensor& x) {
  const int64_t rows = x.size(0), columns = x.size(1);
  const int64_t tiles = gpu::ceil_div(columns, int64_t(kLanes * kPack));
  // Some four blocks per SM, of 64 rows or more.
  const int64_t wanted =
      std::max<int64_t>(1, gpu::ceil_div(int64_t(4 * x.device().multiprocessors()), tiles));
  const int64_t chunk = std::max<int64_t>(64, gpu::ceil_div(rows, wanted)),
                chunks = gpu::ceil_div(rows, chunk);
  gpu::launch(x.device(),
              {.grid = dim3(unsigned(tiles), unsigned(std::min<int64_t>(chunks, 65535))),
               .block = dim3(kLanes * kWays)},
              column_counts_kernel<T, kPack>, counts.data<int32_t>(), x.data<T>(), rows, columns,
              x.layout().stride(0), x.layout().stride(1), chunk);
}

template <Activation kKind, class T>
struct SlopeOfResult {
  __device__ T operator()(T dy, T y) const { return T(float(dy) * slope_of_result<kKind>(float(y))); }
};

}  // namespace

void column_counts_cuda(const Tensor& counts, const Tensor& x) {
  counts.fill(0);
  if (x.count() == 0) return;
  dispatch_floating_cuda(x.dtype(), "column_counts", [&]<class T>() {
    constexpr int kPack = gpu::kPackOf<T>;
    if (x.layout().stride(1) == 1 && gpu::is_pack_aligned(x.data<T>(), x.layout().stride(0), kPack))
      launch<T, kPack>(counts, x);
    else
      launch<T, 1>(counts, x);
  });
}

void activation_gradient_of_result_cuda(const Tensor& dh, const Tensor& dy, const Tensor& y,
                                        Activation kind) {
  dispatch_floating_cuda(y.dtype(), name_of(kind), [&]<class T>() {
    if (kind == Activation::relu)
      gpu::elementwise<T, T, T>(dh, SlopeOfResult<Activation::relu, T>{}, dy, y);
    else
      gpu::elementwise<T, T, T>(dh, SlopeOfResult<Activation::relu_squared, T>{}, dy, y);
  });
}

}  // namespace tessera::ops
