#include "bench/cold.h"
#include "gpu/launch.cuh"

/// Reads a buffer of twice the cache, then waits. A cache flushed by writing is full of dirty lines, and each
/// line that the measured kernel brings in would first push one of them out: a kernel whose data fits the
/// cache would pay twice for its traffic.

namespace tessera::bench {
namespace {

constexpr int kThreads = 512;
constexpr uint64_t kWait = 100'000;  // nanoseconds

__global__ void __launch_bounds__(kThreads) read_kernel(const float4* data, int64_t count, float* sink) {
  float sum = 0;
  for (int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x; i < count;
       i += int64_t(gridDim.x) * kThreads) {
    const float4 v = data[i];
    sum += v.x + v.y + v.z + v.w;
  }
  if (sum == 1e30f) *sink = sum;  // of zeros: never; the compiler does not know
}

__device__ __forceinline__ uint64_t nanoseconds() {
  uint64_t now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  return now;
}

__global__ void wait_kernel() {
  const uint64_t begin = nanoseconds();
  while (nanoseconds() - begin < kWait) __nanosleep(500);
}

}  // namespace

void make_cold_cuda(const Tensor& other) {
  const int64_t count = other.count() / 4;
  gpu::launch(other.device(), {dim3(1024), dim3(kThreads)}, read_kernel,
              static_cast<const float4*>(other.raw()), count, other.data<float>());
  gpu::launch(other.device(), {dim3(1), dim3(1)}, wait_kernel);
}

void driver_copy_cuda(const Tensor& to, const Tensor& from) {
  check(to.bytes() == from.bytes(), "copy: to is ", describe(to), ", from ", describe(from));
  check(cudaMemcpyAsync(to.raw(), from.raw(), from.bytes(), cudaMemcpyDeviceToDevice, to.device().stream()));
}

}  // namespace tessera::bench
