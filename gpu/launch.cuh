#pragma once

#include <cuda_runtime.h>

#include "runtime/cuda.h"
#include "runtime/device.h"
#include "runtime/profile.h"

namespace tessera::gpu {

inline constexpr int kWarp = 32;

/// ceil(a / b)
template <class A, class B>
__host__ __device__ constexpr int64_t ceil_div(A a, B b) {
  return (int64_t(a) + int64_t(b) - 1) / int64_t(b);
}

struct LaunchShape {
  dim3 grid;
  dim3 block;
  size_t shared_bytes = 0;
  int cluster = 1;           // blocks of a cluster, along x; divides the grid
  bool overlaps = false;     // may start before the stream's earlier kernels end: see grid_dependency_wait
  bool cooperative = false;  // all blocks co-resident, or the launch is refused: for grid-wide barriers
};

/// Launches `kernel` on the device's compute stream; an empty grid is a no-op. Throws if the launch
/// is refused.
template <class... Params, class... Args>
void launch(Device device, const LaunchShape& shape, void (*kernel)(Params...), Args&&... args) {
  if (shape.grid.x == 0 || shape.grid.y == 0 || shape.grid.z == 0) return;
  device.activate();
  if (shape.shared_bytes > 32 * 1024)  // above 48 KiB, static variables included, needs an opt-in
    allow_shared_bytes(reinterpret_cast<const void*>(kernel), device.index(), shape.shared_bytes);
  cudaLaunchAttribute attributes[3] = {};
  cudaLaunchConfig_t config{};
  config.gridDim = shape.grid;
  config.blockDim = shape.block;
  config.dynamicSmemBytes = shape.shared_bytes;
  config.stream = device.stream();
  config.attrs = attributes;
  if (shape.cluster > 1) {
    cudaLaunchAttribute& cluster = attributes[config.numAttrs++];
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim = {unsigned(shape.cluster), 1, 1};
  }
  if (shape.overlaps) {
    cudaLaunchAttribute& overlap = attributes[config.numAttrs++];
    overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    overlap.val.programmaticStreamSerializationAllowed = 1;
  }
  if (shape.cooperative) {
    cudaLaunchAttribute& cooperative = attributes[config.numAttrs++];
    cooperative.id = cudaLaunchAttributeCooperative;
    cooperative.val.cooperative = 1;
  }
  check(cudaLaunchKernelEx(&config, kernel, Params(args)...));
}

}  // namespace tessera::gpu
