#pragma once

#include <cstdint>

#include "gpu/shared.cuh"

/// Barriers between the threads of a block or cluster, and between them and TMA, sm_90. Section names are
/// those of the PTX ISA.

namespace tessera::gpu {

/// An mbarrier in shared memory ("Parallel Synchronization and Communication Instructions: mbarrier"): a
/// phase completes when `count` arrivals and all expected bytes are in. The n-th phase (from 0) has parity n
/// % 2. One thread calls init, then all pass fence_barrier_init() and a barrier of the block or cluster.
struct Barrier {
  uint64_t state;

  __device__ __forceinline__ void init(int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(this)), "r"(count)
                 : "memory");
  }
  __device__ __forceinline__ void arrive() {
    asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0];" ::"r"(shared_address(this))
                 : "memory");
  }
  /// Arrives on the barrier at the same shared-memory offset in block `rank` of the cluster.
  __device__ __forceinline__ void arrive_remote(uint32_t rank) {
    asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(
                     cluster_address(shared_address(this), rank))
                 : "memory");
  }
  /// The same with relaxed semantics, for a thread that has written nothing the waiting thread will read: a
  /// consumer that releases a stage that WGMMA has read. A release would cost a fence of GPU scope first.
  __device__ __forceinline__ void arrive_remote_relaxed(uint32_t rank) {
    asm volatile("mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [%0];" ::"r"(
                     cluster_address(shared_address(this), rank))
                 : "memory");
  }
  /// Arrives, and makes the phase wait for `bytes` of asynchronous copies as well (expect_tx).
  __device__ __forceinline__ void arrive_expect(uint32_t bytes) {
    asm volatile(
        "mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(this)),
        "r"(bytes)
        : "memory");
  }
  /// cp.async.mbarrier.arrive ("cp.async.mbarrier.arrive"): the phase also waits for all cp.async that this
  /// thread has issued so far; the expected number of arrivals does not change.
  __device__ __forceinline__ void cp_async_arrive() {
    asm volatile("cp.async.mbarrier.arrive.shared::cta.b64 [%0];" ::"r"(shared_address(this)) : "memory");
  }
  /// mbarrier.try_wait: whether the phase of that parity has completed; may block for a limited time.
  __device__ __forceinline__ bool try_wait(uint32_t parity) {
    uint32_t done;
    asm volatile(
        "{\n\t.reg .pred p;\n\t"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n\t"
        "selp.u32 %0, 1, 0, p;\n\t}"
        : "=r"(done)
        : "r"(shared_address(this)), "r"(parity)
        : "memory");
    return done != 0;
  }
  /// Waits until the phase of that parity has completed. On a fresh barrier, waiting for parity 1 succeeds at
  /// once.
  __device__ __forceinline__ void wait(uint32_t parity) {
    while (!try_wait(parity)) {
    }
  }
};

/// st.async ("st.async"): stores 16 bytes to the shared memory of a block of the cluster and counts them on
/// `barrier` of the same block. Both addresses are those of cluster_address().
__device__ __forceinline__ void st_async(uint32_t to, const uint32_t (&words)[4], uint32_t barrier) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(
          to),
      "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3]), "r"(barrier)
      : "memory");
}

/// Pipeline state: the stage index, and the parity of the phase that completes its current use.
template <int kStages>
struct RingState {
  int stage = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

/// Barriers of a pipeline of kStages between a producer and its consumers: a phase of `full` completes when a
/// stage's bytes have landed, one of `empty` when all consumers have released the stage. The producer waits
/// for empty with parity ^ 1, consumers wait for full with parity.
template <int kStages>
struct Ring {
  Barrier full[kStages], empty[kStages];

  /// One thread. `producers` arrive on full (1 for one copying thread), `consumers` on empty.
  __device__ __forceinline__ void init(int producers, int consumers) {
    for (int stage = 0; stage < kStages; ++stage) {
      full[stage].init(producers);
      empty[stage].init(consumers);
    }
  }
};

/// Makes initialised barriers visible to TMA and the cluster ("fence.mbarrier_init").
__device__ __forceinline__ void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
/// Orders this thread's generic-proxy writes to shared memory before the reads of WGMMA and TMA
/// ("fence.proxy.async"). A barrier among the writing threads must follow.
__device__ __forceinline__ void fence_async_shared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

/// bar.sync ("bar, barrier"): waits until `threads` threads are at named barrier `id` (1 ... 15; 0 is
/// __syncthreads).
__device__ __forceinline__ void sync_named(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
/// bar.red.or: the same, and returns whether `mine` is true in any of those threads.
__device__ __forceinline__ bool sync_named_or(int id, int threads, bool mine) {
  uint32_t any;
  asm volatile(
      "{\n\t.reg .pred p, q;\n\t"
      "setp.ne.u32 p, %3, 0;\n\t"
      "bar.red.or.pred q, %1, %2, p;\n\t"
      "selp.u32 %0, 1, 0, q;\n\t}"
      : "=r"(any)
      : "r"(id), "r"(threads), "r"(uint32_t(mine))
      : "memory");
  return any != 0;
}
/// bar.arrive: arrives without waiting.
__device__ __forceinline__ void arrive_named(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

/// barrier.cluster ("barrier.cluster"): all threads of all blocks of the cluster.
__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_sync() {
  cluster_arrive();
  cluster_wait();
}

/// setmaxnreg ("setmaxnreg"): registers per thread of this warpgroup from here on; 24 ... 256, a multiple of
/// 8. All four warps call it. It is ignored (C7508) unless the kernel has __launch_bounds__ with both
/// numbers.
template <int kRegisters>
__device__ __forceinline__ void warpgroup_reg_alloc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void warpgroup_reg_dealloc() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

/// griddepcontrol ("griddepcontrol"), for kernels launched with LaunchShape::overlaps. `grid_dependency_wait`
/// returns when all earlier kernels of the stream are done and their writes visible: before it, a kernel
/// may only access memory that no kernel writes. `launch_dependents` lets the blocks of the next kernel start
/// when every block of this one has called it or exited. Without LaunchShape::overlaps neither does anything.
__device__ __forceinline__ void grid_dependency_wait() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}
__device__ __forceinline__ void launch_dependents() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

}  // namespace tessera::gpu
