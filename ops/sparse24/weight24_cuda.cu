#include <algorithm>

#include "gpu/dependent_launch.cuh"
#include "gpu/grid.cuh"
#include "ops/sparse24/weight24_kernels.h"
#include "ops/sparse24/weight24_math.h"

/// The mask reads a weight once, and is made every few dozen steps: it is not tuned. A thread has a 4 x 4
/// block: eight threads, whose rows are adjacent in memory, have the 32 columns of four words of the mask,
/// which shuffles put together. Per block 24 sums of pairs and 3 additions and a comparison for each of the
/// 90 patterns, all unrolled, in f64: some 400 f64 operations for 32 bytes of bf16, so that f64 bounds it, at
/// an H200's 34 TFLOP/s 12 us for 16 M elements.

namespace tessera::ops {
namespace {

constexpr int kThreads = 256, kLanes = 8;  // of a word
constexpr uint32_t kAll = 0xFFFFFFFFu;

template <class T>
__global__ void __launch_bounds__(kThreads)
    transposable_kernel(int32_t* mask, int64_t mask_stride, const T* weight, int64_t down, int64_t along,
                        int64_t rows, int64_t columns, int64_t words, int64_t total) {
  gpu::wait_and_launch_dependents();
  const int lane = int(threadIdx.x) % kLanes;
  const int64_t step = int64_t(gridDim.x) * kThreads / kLanes;
  // All threads of a warp stay in the loop as long as one of them has an item: they shuffle.
  for (int64_t first = (int64_t(blockIdx.x) * kThreads + threadIdx.x / gpu::kWarp * gpu::kWarp) / kLanes;
       first < total; first += step) {
    const int64_t item = first + threadIdx.x % gpu::kWarp / kLanes;
    const int64_t block = item / words, w = item - block * words;
    const int64_t row = 4 * block, column = 32 * w + 4 * lane;
    double magnitude[4][4];
#pragma unroll
    for (int r = 0; r < 4; ++r)
#pragma unroll
      for (int c = 0; c < 4; ++c)
        magnitude[r][c] =
            item < total && row + r < rows && column + c < columns
                ? weight24::magnitude_of(double(float(weight[(row + r) * down + (column + c) * along])))
                : 0.0;
    const uint32_t bits = weight24::best_pattern(magnitude);
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      uint32_t kept = bits >> 4 * r & 0xF;
#pragma unroll
      for (int c = 0; c < 4; ++c)
        if (column + c >= columns) kept &= ~(1u << c);
      uint32_t word = kept << 4 * lane;
#pragma unroll
      for (int other = 1; other < kLanes; other *= 2) word |= __shfl_xor_sync(kAll, word, other);
      if (lane == r && item < total && row + r < rows) mask[(row + r) * mask_stride + w] = int32_t(word);
    }
  }
}

}  // namespace

void transposable24_cuda(const Tensor& mask, const Tensor& weight) {
  const Device device = weight.device();
  dispatch_floating_cuda(weight.dtype(), "transposable24", [&]<class T>() {
    const int64_t words = mask.size(1), total = (weight.size(0) + 3) / 4 * words;
    const int64_t blocks = std::min<int64_t>(gpu::ceil_div(total * kLanes, int64_t(kThreads)),
                                             int64_t(device.multiprocessors()) * 16);
    gpu::launch_dependent(device, {gpu::grid_of(blocks), kThreads}, transposable_kernel<T>,
                          mask.data<int32_t>(), mask.row_stride(), weight.data<T>(),
                          weight.layout().stride(0), weight.layout().stride(1), weight.size(0),
                          weight.size(1), words, total);
  });
}

}  // namespace tessera::ops
