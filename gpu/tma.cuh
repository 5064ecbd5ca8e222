#pragma once

#include <cstdint>

#include "gpu/barrier.cuh"
#include "gpu/tensor_map.cuh"

/// TMA of sm_90: tensor copies by a map, and bulk copies of plain bytes. One thread issues each.
/// Section names are those of the PTX ISA. Shared addresses are multiples of 128 (tensor) or 16 (bulk).

namespace tessera::gpu {

/// L2 policies ("createpolicy").
__device__ __forceinline__ uint64_t evict_first() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
__device__ __forceinline__ uint64_t evict_last() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

/// Fetches the map itself ahead of its first use ("prefetch.tensormap").
__device__ __forceinline__ void prefetch_map(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

/// cp.async.bulk.tensor ("cp.async.bulk.tensor"), global to shared: the map's box at these coordinates,
/// innermost first, lands at `to` and counts its whole size in bytes on `barrier`; outside the tensor it
/// reads zeros.
__device__ __forceinline__ void tma_load(void* to, const TensorMap& map, Barrier& barrier, int c0, int c1) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, "
      "%4}], [%2];" ::"r"(shared_address(to)),
      "l"(&map), "r"(shared_address(&barrier)), "r"(c0), "r"(c1)
      : "memory");
}
__device__ __forceinline__ void tma_load(void* to, const TensorMap& map, Barrier& barrier, int c0, int c1,
                                         int c2) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, "
      "%5}], [%2];" ::"r"(shared_address(to)),
      "l"(&map), "r"(shared_address(&barrier)), "r"(c0), "r"(c1), "r"(c2)
      : "memory");
}
__device__ __forceinline__ void tma_load(void* to, const TensorMap& map, Barrier& barrier, int c0, int c1,
                                         int c2, int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, "
      "%5, "
      "%6}], [%2];" ::"r"(shared_address(to)),
      "l"(&map), "r"(shared_address(&barrier)), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}
/// The same with an L2 policy.
__device__ __forceinline__ void tma_load(void* to, const TensorMap& map, Barrier& barrier, uint64_t policy,
                                         int c0, int c1) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
      "[%1, "
      "{%3, %4}], [%2], %5;" ::"r"(shared_address(to)),
      "l"(&map), "r"(shared_address(&barrier)), "r"(c0), "r"(c1), "l"(policy)
      : "memory");
}
__device__ __forceinline__ void tma_load(void* to, const TensorMap& map, Barrier& barrier, uint64_t policy,
                                         int c0, int c1, int c2) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
      "[%1, "
      "{%3, %4, %5}], [%2], %6;" ::"r"(shared_address(to)),
      "l"(&map), "r"(shared_address(&barrier)), "r"(c0), "r"(c1), "r"(c2), "l"(policy)
      : "memory");
}
__device__ __forceinline__ void tma_load(void* to, const TensorMap& map, Barrier& barrier, uint64_t policy,
                                         int c0, int c1, int c2, int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
      "[%1, "
      "{%3, %4, %5, %6}], [%2], %7;" ::"r"(shared_address(to)),
      "l"(&map), "r"(shared_address(&barrier)), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "l"(policy)
      : "memory");
}
/// The same to every block of the cluster whose bit is set in `blocks`: the box lands at the same offset in
/// the shared memory of each, and the barrier at that offset in each block counts the bytes it gets.
__device__ __forceinline__ void tma_load_multicast(void* to, const TensorMap& map, Barrier& barrier,
                                                   uint16_t blocks, int c0, int c1) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1, "
      "{%4, %5}], [%2], %3;" ::"r"(shared_address(to)),
      "l"(&map), "r"(shared_address(&barrier)), "h"(blocks), "r"(c0), "r"(c1)
      : "memory");
}
__device__ __forceinline__ void tma_load_multicast(void* to, const TensorMap& map, Barrier& barrier,
                                                   uint16_t blocks, int c0, int c1, int c2) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1, "
      "{%4, %5, %6}], [%2], %3;" ::"r"(shared_address(to)),
      "l"(&map), "r"(shared_address(&barrier)), "h"(blocks), "r"(c0), "r"(c1), "r"(c2)
      : "memory");
}

/// cp.async.bulk.prefetch.tensor ("cp.async.bulk.prefetch.tensor"): fetches the box into L2.
__device__ __forceinline__ void tma_prefetch(const TensorMap& map, int c0, int c1) {
  asm volatile("cp.async.bulk.prefetch.tensor.2d.L2.global.tile [%0, {%1, %2}];" ::"l"(&map), "r"(c0), "r"(c1)
               : "memory");
}
__device__ __forceinline__ void tma_prefetch(const TensorMap& map, int c0, int c1, int c2) {
  asm volatile("cp.async.bulk.prefetch.tensor.3d.L2.global.tile [%0, {%1, %2, %3}];" ::"l"(&map), "r"(c0),
               "r"(c1), "r"(c2)
               : "memory");
}

/// Shared to global; rows outside the tensor are not written. The innermost extent counts rounded up to 16
/// bytes here: up to 7 elements of 16 bits after a row's end are overwritten (what the box holds there), so
/// they must be row padding of the same tensor. Part of the thread's bulk group.
__device__ __forceinline__ void tma_store(const TensorMap& map, const void* from, int c0, int c1) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%2, %3}], [%1];" ::"l"(&map),
               "r"(shared_address(from)), "r"(c0), "r"(c1)
               : "memory");
}
__device__ __forceinline__ void tma_store(const TensorMap& map, const void* from, int c0, int c1, int c2) {
  asm volatile(
      "cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(&map),
      "r"(shared_address(from)), "r"(c0), "r"(c1), "r"(c2)
      : "memory");
}
__device__ __forceinline__ void tma_store(const TensorMap& map, const void* from, int c0, int c1, int c2,
                                          int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(&map),
      "r"(shared_address(from)), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}

/// cp.async.bulk ("cp.async.bulk"): `bytes`, a multiple of 16, global to shared, counted on `barrier`.
__device__ __forceinline__ void bulk_load(void* to, const void* from, uint32_t bytes, Barrier& barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
          shared_address(to)),
      "l"(from), "r"(bytes), "r"(shared_address(&barrier))
      : "memory");
}
/// The same with an L2 policy.
__device__ __forceinline__ void bulk_load(void* to, const void* from, uint32_t bytes, Barrier& barrier,
                                          uint64_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, "
      "[%3], "
      "%4;" ::"r"(shared_address(to)),
      "l"(from), "r"(bytes), "r"(shared_address(&barrier)), "l"(policy)
      : "memory");
}
/// Shared to global, part of the thread's bulk group.
__device__ __forceinline__ void bulk_store(void* to, const void* from, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to),
               "r"(shared_address(from)), "r"(bytes)
               : "memory");
}
/// cp.reduce.async.bulk ("cp.reduce.async.bulk"): adds floats in shared memory to floats in global memory;
/// each element's addition is atomic. Part of the thread's bulk group.
__device__ __forceinline__ void bulk_reduce_add(float* to, const float* from, uint32_t bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to),
               "r"(shared_address(from)), "r"(bytes)
               : "memory");
}

/// cp.reduce.async.bulk.tensor ("cp.reduce.async.bulk.tensor"): adds a box of floats in shared memory to the
/// map's tensor; each element's addition is atomic. Nothing is added outside the tensor, but the innermost
/// extent is rounded up to 16 bytes as in tma_store. Part of the thread's bulk group.
__device__ __forceinline__ void tma_reduce_add(const TensorMap& map, const void* from, int c0, int c1) {
  asm volatile(
      "cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group [%0, {%2, %3}], [%1];" ::"l"(
          &map),
      "r"(shared_address(from)), "r"(c0), "r"(c1)
      : "memory");
}

/// Closes the thread's group of bulk stores so far ("cp.async.bulk.commit_group").
__device__ __forceinline__ void commit_stores() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
/// Waits until all but the newest kPending groups have read their shared memory, so it may be overwritten.
template <int kPending>
__device__ __forceinline__ void wait_stores_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}
/// Waits until all but the newest kPending groups have written global memory.
template <int kPending>
__device__ __forceinline__ void wait_stores() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace tessera::gpu
