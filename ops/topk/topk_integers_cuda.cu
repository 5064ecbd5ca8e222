#include <algorithm>
#include <cub/device/device_segmented_radix_sort.cuh>

#include "gpu/dependent_launch.cuh"
#include "gpu/grid.cuh"
#include "ops/topk/topk_kernels.h"

/// The k largest whole numbers of each row: rows are sorted as a whole, as i64 with their indices (CUB, one
/// segment per row, stable, so that of equal numbers the lowest index comes first). 64 bits of number and 32
/// of index do not fit the keys of topk_cuda.cu; a selection would read less.

namespace tessera::ops {
namespace {

constexpr int kThreads = 256;

/// The index of each element in its row, and where rows begin.
__global__ void __launch_bounds__(kThreads)
    number_kernel(int64_t* indices, int64_t* begins, int64_t rows, int64_t length) {
  gpu::wait_and_launch_dependents();
  const int64_t step = int64_t(gridDim.x) * kThreads, first = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  for (int64_t i = first; i < rows * length; i += step) indices[i] = i % length;
  for (int64_t row = first; row <= rows; row += step) begins[row] = row * length;
}

}  // namespace

void topk_integers_cuda(const Tensor& indices, const Tensor& x) {
  const Device device = x.device();
  const int64_t rows = x.rows(), length = x.row_length(), count = rows * length;
  const auto scratch = [&](int64_t n, DType dtype) { return Tensor::empty_packed({n}, dtype, device); };
  const Tensor keys = x.to(DType::i64).packed(), numbers = scratch(count, DType::i64);
  const Tensor sorted = scratch(count, DType::i64),
               order = Tensor::empty_packed({rows, length}, DType::i64, device);
  const Tensor begins = scratch(rows + 1, DType::i64);
  const int64_t* const begin = begins.data<int64_t>();
  const int64_t blocks =
      std::min<int64_t>(gpu::ceil_div(count + 1, kThreads), int64_t(device.multiprocessors()) * 32);
  gpu::launch_dependent(device, {gpu::grid_of(blocks), kThreads}, number_kernel, numbers.data<int64_t>(),
                        begins.data<int64_t>(), rows, length);
  const auto sort = [&](void* temporary, size_t& bytes) {
    check(cub::DeviceSegmentedRadixSort::SortPairsDescending(
        temporary, bytes, keys.data<int64_t>(), sorted.data<int64_t>(), numbers.data<int64_t>(),
        order.data<int64_t>(), count, rows, begin, begin + 1, 0, 64, device.stream()));
  };
  size_t bytes = 0;
  sort(nullptr, bytes);
  const Tensor temporary = scratch(int64_t(std::max<size_t>(bytes, 1)), DType::u8);
  sort(temporary.raw(), bytes);
  indices.reshape({rows, indices.size(-1)}).copy_from(order.slice(1, 0, indices.size(-1)));
}

}  // namespace tessera::ops
