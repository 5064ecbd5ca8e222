#pragma once

#include <cuda_runtime.h>

#include "runtime/cuda.h"
#include "runtime/device.h"
#include "runtime/wait.h"

/// Another user of the GPU, for tests.

namespace tessera::ops {

/// All shared memory of an SM that a block may have: no other block starts next to it.
inline constexpr int kWholeSm = 227 * 1024;

/// words: the blocks that run, and whether they may end. Volatile: the host's writes are seen.
static __global__ void __launch_bounds__(128) occupy_kernel(volatile unsigned* words, unsigned* arrived) {
  if (threadIdx.x != 0) return;
  if (atomicAdd(arrived, 1u) == gridDim.x - 1) {
    words[0] = gridDim.x;
    __threadfence_system();
  }
  while (words[1] == 0) __nanosleep(1000);
}

/// While it lives, a kernel on a stream of its own occupies all SMs of compute capability 9.0 but `free`.
/// Memory of the device must not be given back to the driver meanwhile: that waits for the kernel.
class BusyGpu {
 public:
  BusyGpu(Device gpu, int free) : gpu_(gpu) {
    gpu.activate();
    check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    check(cudaHostAlloc(reinterpret_cast<void**>(&words_), 2 * sizeof(unsigned), cudaHostAllocMapped));
    words_[0] = words_[1] = 0;
    check(cudaMalloc(reinterpret_cast<void**>(&arrived_), sizeof(unsigned)));
    check(cudaMemsetAsync(arrived_, 0, sizeof(unsigned), stream_));
    check(cudaFuncSetAttribute(occupy_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kWholeSm));
    const unsigned blocks = unsigned(gpu.info().multiprocessors - free);
    occupy_kernel<<<blocks, 128, kWholeSm, stream_>>>(words_, arrived_);
    check(cudaGetLastError());
    wait_until([&] { return static_cast<volatile unsigned*>(words_)[0] == blocks; },
               "blocks that occupy SMs");
  }
  ~BusyGpu() {
    static_cast<volatile unsigned*>(words_)[1] = 1;
    cudaStreamSynchronize(stream_);
    cudaStreamDestroy(stream_);
    cudaFreeHost(words_);
    cudaFree(arrived_);
  }
  BusyGpu(const BusyGpu&) = delete;

 private:
  Device gpu_;
  cudaStream_t stream_ = nullptr;
  unsigned* words_ = nullptr;
  unsigned* arrived_ = nullptr;
};

}  // namespace tessera::ops
