#pragma once

#include <cstdint>

/// Special registers read, and addresses mapped, by volatile instructions: again at each call. What is
/// computed of threadIdx or blockIdx the compiler computes before a kernel's loop, and holds in registers
/// that the accumulators need; of these it computes where they are called.

namespace tessera::gpu {

__device__ __forceinline__ int thread_again() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}
__device__ __forceinline__ int lane_again() {
  int lane;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane;
}
__device__ __forceinline__ int block_again() {
  int block;
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(block));
  return block;
}
__device__ __forceinline__ int grid_again() {
  int blocks;
  asm volatile("mov.u32 %0, %%nctaid.x;" : "=r"(blocks));
  return blocks;
}
__device__ __forceinline__ int cluster_rank_again() {
  int rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
/// cluster_address (gpu/shared.cuh).
__device__ __forceinline__ uint32_t cluster_address_again(uint32_t address, int rank) {
  uint32_t remote;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
  return remote;
}

}  // namespace tessera::gpu
