#include "gpu/launch.cuh"
#include "ops/gemm/gemm_tf32.h"

/// A transposed copy through shared memory: tiles of 32 x 32, rows padded by one word, so that both the reads
/// and the writes are lines of 128 bytes and no bank is met twice. 8 bytes per element; for weights, bound by
/// the launch.

namespace tessera::ops {
namespace {

constexpr int kTile = 32, kRowsAtOnce = 8;

__global__ void __launch_bounds__(kTile* kRowsAtOnce)
    transposed_copy_kernel(float* y, int64_t y_stride, const float* x, int64_t x_stride, int64_t rows,
                           int64_t columns, int64_t across) {
  __shared__ float tile[kTile][kTile + 1];
  const int lane = int(threadIdx.x) % kTile, first = int(threadIdx.x) / kTile;
  const int64_t row = blockIdx.x / across * kTile, column = blockIdx.x % across * kTile;
  for (int i = first; i < kTile; i += kRowsAtOnce)
    if (row + i < rows && column + lane < columns) tile[i][lane] = x[(row + i) * x_stride + column + lane];
  __syncthreads();
  for (int i = first; i < kTile; i += kRowsAtOnce)
    if (column + i < columns && row + lane < rows) y[(column + i) * y_stride + row + lane] = tile[lane][i];
}

}  // namespace

void transposed_copy_cuda(const Tensor& y, const Tensor& x) {
  const int64_t rows = x.size(0), columns = x.size(1);
  const int64_t down = gpu::ceil_div(rows, kTile), across = gpu::ceil_div(columns, kTile);
  check(down * across <= int64_t{0x7FFFFFFF}, "transposed copy: ", describe(x),
        " needs more than 2^31 - 1 blocks");
  gpu::launch(x.device(), {dim3(unsigned(down * across)), kTile * kRowsAtOnce}, transposed_copy_kernel,
              y.data<float>(), y.layout().stride(0), static_cast<const float*>(x.data<float>()),
              x.layout().stride(0), rows, columns, across);
}

}  // namespace tessera::ops
