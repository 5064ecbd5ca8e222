#include "gpu/dependent_launch.cuh"
#include "gpu/grid.cuh"
#include "ops/mlp/linear_activation24_kernels.h"

/// The index of dense columns that the epilogue of linear_activation24 reads: a thread per dense column.

namespace tessera::ops {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads)
    column_slots_kernel(int* slots, const int* columns, int count, int hidden) {
  gpu::wait_and_launch_dependents();
  const int i = int(blockIdx.x) * kThreads + int(threadIdx.x);
  // A column outside the matrix is skipped.
  if (i < count && unsigned(columns[i]) < unsigned(hidden)) slots[columns[i]] = i;
}

}  // namespace

void column_slots_cuda(const Tensor& slots, const Tensor& columns) {
  slots.fill(-1);
  const int64_t count = columns.count();
  if (count == 0) return;
  gpu::launch_dependent(slots.device(), {gpu::grid_of(gpu::ceil_div(count, kThreads)), kThreads},
                        column_slots_kernel, slots.data<int32_t>(),
                        static_cast<const int*>(columns.data<int32_t>()), int(count), int(slots.count()));
}

}  // namespace tessera::ops
