#pragma once

#include <cstdint>

/// Addresses of shared memory, the warp's index and its elected lane. Section names are those of the PTX ISA.

namespace tessera::gpu {

/// The 32-bit address that instructions on shared memory take.
__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return uint32_t(__cvta_generic_to_shared(pointer));
}
/// mapa ("mapa"): the same place in the shared memory of block `rank` of the cluster.
__device__ __forceinline__ uint32_t cluster_address(uint32_t address, uint32_t rank) {
  uint32_t remote;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
  return remote;
}
/// ld.shared::cluster ("ld") of a float, at a cluster_address().
__device__ __forceinline__ float load_cluster(uint32_t from) {
  float value;
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(value) : "r"(from) : "memory");
  return value;
}
/// This block's index in its cluster.
__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

/// ld.shared.v4 ("ld"): 16 bytes.
__device__ __forceinline__ void load_shared(uint32_t (&words)[4], uint32_t from) {
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(from)
               : "memory");
}

/// A value that is the same in all lanes, said so that the compiler keeps it in a uniform register and
/// branches on it without divergence.
__device__ __forceinline__ int uniform(int value) {
  return __shfl_sync(0xFFFFFFFFu, value, 0);
}
/// elect.sync ("elect.sync"): true in one lane of a whole warp.
__device__ __forceinline__ bool elect_one() {
  uint32_t chosen;
  asm volatile(
      "{\n\t.reg .pred p;\n\t"
      "elect.sync _|p, 0xFFFFFFFF;\n\t"
      "selp.u32 %0, 1, 0, p;\n\t}"
      : "=r"(chosen));
  return chosen != 0;
}

/// stmatrix.sync.aligned.m8n8.x4.shared.b16 ("stmatrix"), sm_90: the reverse of ldmatrix_x4. Lane l names the
/// 16-byte row l % 8 of matrix l / 8; register i of lane l holds elements 2 (l % 4) and the next of row l / 4
/// of matrix i (.trans: of the transposed matrix).
__device__ __forceinline__ void stmatrix_x4(uint32_t row, const uint32_t (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(row), "r"(r[0]),
               "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}
__device__ __forceinline__ void stmatrix_x4_trans(uint32_t row, const uint32_t (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(row), "r"(r[0]),
               "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}

}  // namespace tessera::gpu
