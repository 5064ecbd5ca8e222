#include "gpu/sum.cuh"
#include "ops/indices.h"
#include "ops/linear_cross_entropy/linear_cross_entropy_kernels.h"

/// What is left of the loss when the chunks are done: two sums over the tokens, 4 and 8 bytes each, by one
/// block. A hundred thousand tokens take some microseconds, next to products of milliseconds.

namespace tessera::ops {
namespace {

constexpr int kBlock = 1024;

__global__ void __launch_bounds__(kBlock)
    count_kernel(float* count, Indices targets, int64_t rows, int64_t ignored) {
  double counted = 0;  // exact: a sum of ones
  for (int64_t row = threadIdx.x; row < rows; row += kBlock) counted += targets[row] != ignored;
  counted = gpu::block_sum(counted);
  if (threadIdx.x == 0) *count = float(counted);
}

__global__ void __launch_bounds__(kBlock)
    sum_kernel(float* loss, const float* losses, int64_t rows, const float* count) {
  double sum = 0;
  for (int64_t row = threadIdx.x; row < rows; row += kBlock) sum += double(losses[row]);
  sum = gpu::block_sum(sum);
  if (threadIdx.x == 0) *loss = float(count ? sum / double(*count) : sum);
}

}  // namespace

void count_targets_cuda(const Tensor& count, const Tensor& targets, int64_t ignored) {
  gpu::launch(targets.device(), {dim3(1), kBlock}, count_kernel, count.data<float>(), Indices(targets),
              targets.count(), ignored);
}

void sum_losses_cuda(const Tensor& loss, const Tensor& losses, const Tensor& count) {
  gpu::launch(losses.device(), {dim3(1), kBlock}, sum_kernel, loss.data<float>(), losses.data<float>(),
              losses.count(), count.defined() ? count.data<float>() : nullptr);
}

}  // namespace tessera::ops
