#include "runtime/counter.h"
#include "runtime/cuda.h"

namespace tessera {
namespace {

__global__ void advance_kernel(uint64_t* counter, uint64_t step) {
  *counter += step;
}

}  // namespace

DeviceCounter::DeviceCounter(Device device) : device_(device) {
  device.activate();
  check(cudaMalloc(&data_, sizeof(uint64_t)));
}

DeviceCounter::~DeviceCounter() {
  cudaFree(data_);
}

void DeviceCounter::set(uint64_t value) {
  if (known_ == value) return;
  // Pageable memory: the runtime stages eight bytes at once, so `value` may go out of scope.
  check(cudaMemcpyAsync(data_, &value, sizeof value, cudaMemcpyHostToDevice, device_.stream()));
  known_ = value;
}

void DeviceCounter::advance(uint64_t step) {
  advance_kernel<<<1, 1, 0, device_.stream()>>>(data_, step);
  check(cudaGetLastError());
}

}  // namespace tessera
