#pragma once

#include <cstdint>

/// Special registers and mapped addresses, read by volatile instructions: read again at each call. The
/// compiler hoists values computed from threadIdx or blockIdx out of a kernel's loop and keeps them in
/// registers that the accumulators need; what is computed from these functions is computed where they are
/// called.

namespace tessera::gpu {

__device__ __forceinline__ int reread_thread() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}
__device__ __forceinline__ int reread_lane() {
  int lane;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane;
}
__device__ __forceinline__ int reread_block() {
  int block;
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(block));
  return block;
}
__device__ __forceinline__ int reread_grid() {
  int blocks;
  asm volatile("mov.u32 %0, %%nctaid.x;" : "=r"(blocks));
  return blocks;
}
__device__ __forceinline__ int reread_cluster_rank() {
  int rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
/// cluster_address (gpu/shared.cuh).
__device__ __forceinline__ uint32_t reread_cluster_address(uint32_t address, int rank) {
  uint32_t remote;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
  return remote;
}

}  // namespace tessera::gpu
