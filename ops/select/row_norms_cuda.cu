#include <algorithm>

#include "gpu/dependent_launch.cuh"
#include "gpu/global.cuh"
#include "gpu/grid.cuh"
#include "ops/select/select_kernels.h"

/// Norms of the rows of a matrix: each element read once, 4 bytes per row written, bound by memory.
///
/// A warp has two rows at a time and asks for up to four 16-byte words of each and lane before it needs the
/// first: 8 KiB in flight for rows of 2 KiB and more, 6 for 768 elements of bf16, and four blocks of eight
/// warps per SM, next to the 25 KiB per SM that bandwidth times latency asks for. The general reduction
/// (ops/reduce) unrolls by four whole steps, so that of rows of three steps each waits for the one before.
/// Sums are in f64, an FMA per element: 16 conversions per clock and SM take half of the time that the bytes
/// take.

namespace tessera::ops {
namespace {

constexpr int kThreads = 256, kBlocksPerSm = 4;
constexpr int kRows = 2, kDeep = 4;  // rows of a warp, and words of each that a lane has in flight

template <class T>
__device__ __forceinline__ void add_squares(double& sum, const gpu::Words<T>& words) {
  float values[gpu::kPackOf<T>];
  gpu::unpack(values, words);
#pragma unroll
  for (int i = 0; i < gpu::kPackOf<T>; ++i) sum = fma(double(values[i]), double(values[i]), sum);
}

template <class T>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    norms_by_warp(float* norms, const T* x, int64_t stride, int64_t rows, int64_t columns) {
  constexpr int kPack = gpu::kPackOf<T>, kWarps = kThreads / gpu::kWarp;
  constexpr int64_t kStep = gpu::kWarp * kPack;
  gpu::wait_and_launch_dependents();
  const int lane = int(threadIdx.x) % gpu::kWarp, warp = int(threadIdx.x) / gpu::kWarp;
  const int64_t packed = columns / kPack * kPack;
  for (int64_t first = (blockIdx.x * int64_t(kWarps) + warp) * kRows; first < rows;
       first += int64_t(gridDim.x) * kWarps * kRows) {
    double sums[kRows] = {};
    for (int64_t at = int64_t(lane) * kPack; at < packed; at += kDeep * kStep) {
      gpu::Words<T> words[kRows][kDeep];  // zeros past the end of a row, and past the last row
#pragma unroll
      for (int row = 0; row < kRows; ++row)
#pragma unroll
        for (int deep = 0; deep < kDeep; ++deep)
          if (first + row < rows && at + deep * kStep < packed)
            words[row][deep] = gpu::load_no_allocate(x + (first + row) * stride + at + deep * kStep);
#pragma unroll
      for (int row = 0; row < kRows; ++row)
#pragma unroll
        for (int deep = 0; deep < kDeep; ++deep) add_squares(sums[row], words[row][deep]);
    }
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      if (lane == 0 && packed < columns && first + row < rows)  // what follows in memory is not the row's
        add_squares(sums[row], gpu::load_tail(x + (first + row) * stride + packed, int(columns - packed)));
      __syncwarp();
#pragma unroll
      for (int step = gpu::kWarp / 2; step > 0; step /= 2)
        sums[row] += __shfl_xor_sync(0xFFFFFFFFu, sums[row], step);
      if (lane == 0 && first + row < rows) norms[first + row] = float(sqrt(sums[row]));
    }
  }
}

}  // namespace

void row_norms_cuda(const Tensor& norms, const Tensor& x) {
  const Device device = x.device();
  dispatch_floating_cuda(x.dtype(), "row_norms", [&]<class T>() {
    const int64_t blocks = std::min<int64_t>(gpu::ceil_div(x.size(0), kThreads / gpu::kWarp * kRows),
                                             int64_t(device.multiprocessors()) * 32);
    gpu::launch_dependent(device, {gpu::grid_of(blocks), kThreads}, norms_by_warp<T>, norms.data<float>(),
                          x.data<T>(), x.layout().stride(0), x.size(0), x.size(1));
  });
}

}  // namespace tessera::ops
