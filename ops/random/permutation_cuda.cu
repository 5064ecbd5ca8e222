#include <algorithm>
#include <cub/device/device_radix_sort.cuh>

#include "gpu/grid.cuh"
#include "gpu/launch.cuh"
#include "ops/random/random_kernels.h"

/// The keys and their places sorted together (CUB, a radix sort, which is stable): some eight passes over 16
/// bytes per number.

namespace tessera::ops {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads) count_kernel(int64_t* places, int64_t n) {
  for (int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x; i < n; i += int64_t(gridDim.x) * kThreads)
    places[i] = i;
}

}  // namespace

void order_of_keys_cuda(const Tensor& order, const Tensor& keys) {
  const Device device = order.device();
  const int64_t n = order.count();
  const auto scratch = [&](int64_t count, DType dtype) {
    return Tensor::empty_packed({count}, dtype, device);
  };
  const Tensor places = scratch(n, DType::i64), sorted = scratch(n, DType::i64);
  const int64_t blocks =
      std::min<int64_t>(gpu::ceil_div(n, kThreads), int64_t(device.multiprocessors()) * 32);
  gpu::launch(device, {gpu::grid_of(blocks), kThreads}, count_kernel, places.data<int64_t>(), n);
  const auto sort = [&](void* temporary, size_t& bytes) {
    check(cub::DeviceRadixSort::SortPairs(temporary, bytes, static_cast<const uint64_t*>(keys.raw()),
                                          static_cast<uint64_t*>(sorted.raw()),
                                          static_cast<const int64_t*>(places.data<int64_t>()),
                                          order.data<int64_t>(), n, 0, 63, device.stream()));
  };
  size_t bytes = 0;
  sort(nullptr, bytes);
  const Tensor temporary = scratch(int64_t(std::max<size_t>(bytes, 1)), DType::u8);
  sort(temporary.raw(), bytes);
}

}  // namespace tessera::ops
