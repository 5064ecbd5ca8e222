#pragma once

#include <cstdint>

#include "gpu/pack.cuh"

/// Global memory: flags between blocks, loads that bypass L1, and prefetches. Section names are those of the
/// PTX ISA.

namespace tessera::gpu {

/// ld.acquire.gpu ("ld") of 32 bits: makes visible what the thread that stored the value with release had
/// written before.
template <class T>
__device__ __forceinline__ T load_acquire(const T* from) {
  static_assert(sizeof(T) == 4);
  T value;
  asm volatile("ld.acquire.gpu.global.b32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
}
/// atom.add.acq_rel.gpu ("atom"): adds and returns the old value; acquires and releases.
__device__ __forceinline__ int atomic_add_acq_rel(int* to, int value) {
  int before;
  asm volatile("atom.add.acq_rel.gpu.global.s32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(to), "r"(value)
               : "memory");
  return before;
}
/// red.add.release.gpu ("red"): adds; a load_acquire that sees the sum sees what this thread had written
/// before.
__device__ __forceinline__ void red_add_release(int* to, int value) {
  asm volatile("red.add.release.gpu.global.s32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}
/// red.max.release.gpu ("red"): keeps the greater value, and releases as red_add_release does.
__device__ __forceinline__ void red_max_release(int* to, int value) {
  asm volatile("red.max.release.gpu.global.s32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}
/// Orders this thread's accesses to global memory through the generic proxy before those that TMA makes for
/// it ("fence.proxy.async"), sm_90.
__device__ __forceinline__ void fence_async_global() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}

/// ld.global.L1::no_allocate ("ld"): loads 16 bytes that are read only once.
template <class T>
__device__ __forceinline__ Words<T> load_no_allocate(const T* from) {
  Words<T> words;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(words.word[0]), "=r"(words.word[1]), "=r"(words.word[2]), "=r"(words.word[3])
               : "l"(from));
  return words;
}

/// prefetch.global.L2 ("prefetch"): the line at this address.
__device__ __forceinline__ void prefetch_l2(const void* from) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(from));
}
/// cp.async.bulk.prefetch.L2 ("cp.async.bulk.prefetch"), sm_90: `bytes`, a multiple of 16.
__device__ __forceinline__ void bulk_prefetch_l2(const void* from, uint32_t bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}

}  // namespace tessera::gpu
