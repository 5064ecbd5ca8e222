#pragma once

#include <cstdint>

#include "gpu/shared.cuh"

/// How threads of a block or cluster wait for each other and for TMA, sm_90. Section names are
/// those of the PTX ISA.

namespace tessera::gpu {

/// An mbarrier in shared memory ("Parallel Synchronization and Communication Instructions: mbarrier"): a
/// phase ends when `count` arrivals and all expected bytes are there. The n-th phase (from 0) has parity n %
/// 2. One thread calls init, then all pass fence_barrier_init() and a barrier of the block or cluster.
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
  /// Arrives at the barrier at this place in the shared memory of block `rank` of the cluster.
  __device__ __forceinline__ void arrive_at(uint32_t rank) {
    asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(
                     cluster_address(shared_address(this), rank))
                 : "memory");
  }
  /// The same by a thread that has written nothing the others are to see, such as one that lets a buffer go
  /// that wgmma has read: without release there is no fence of the whole GPU before it.
  __device__ __forceinline__ void let_go_at(uint32_t rank) {
    asm volatile("mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [%0];" ::"r"(
                     cluster_address(shared_address(this), rank))
                 : "memory");
  }
  /// Arrives, and lets the phase wait for that many bytes of asynchronous copies as well.
  __device__ __forceinline__ void arrive_expect(uint32_t bytes) {
    asm volatile(
        "mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(this)),
        "r"(bytes)
        : "memory");
  }
  /// cp.async.mbarrier.arrive ("cp.async.mbarrier.arrive"): the phase waits for all cp.async of this thread
  /// so far as well; counts for no arrival.
  __device__ __forceinline__ void arrive_after_copies() {
    asm volatile("cp.async.mbarrier.arrive.shared::cta.b64 [%0];" ::"r"(shared_address(this)) : "memory");
  }
  /// Whether the phase of that parity has ended; may wait a while before it answers.
  __device__ __forceinline__ bool ended(uint32_t parity) {
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
  /// Waits until the phase of that parity has ended. A fresh barrier passes a wait for parity 1 at once.
  __device__ __forceinline__ void wait(uint32_t parity) {
    while (!ended(parity)) {
    }
  }
};

/// st.async ("st.async"): 16 bytes into the shared memory of a block of the cluster, which `barrier`, there
/// too, counts. Both addresses are cluster_address()'s.
__device__ __forceinline__ void send_words(uint32_t to, const uint32_t (&words)[4], uint32_t barrier) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(
          to),
      "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3]), "r"(barrier)
      : "memory");
}

/// Place in a ring of kStages buffers: the stage, and the parity with which its current round ends.
template <int kStages>
struct RingPlace {
  int stage = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

/// A ring of buffers between a producer and its consumers: `full` ends when a buffer's bytes have landed,
/// `empty` when all consumers have let it go. The producer waits for empty with parity ^ 1, consumers for
/// full with parity.
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
/// Orders this thread's ordinary writes to shared memory before what wgmma and TMA read of it
/// ("fence.proxy.async"). A barrier among the writing threads must follow.
__device__ __forceinline__ void fence_async_shared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

/// bar.sync ("bar, barrier"): waits until `threads` threads are at named barrier `id` (1 ... 15; 0 is
/// __syncthreads).
__device__ __forceinline__ void sync_named(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
/// bar.red.or: the same; whether `mine` is true in any of them.
__device__ __forceinline__ bool any_named(int id, int threads, bool mine) {
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
/// bar.arrive: counts as there, and goes on.
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

/// setmaxnreg ("setmaxnreg"): the warpgroup's registers a thread from here on; 24 ... 256, a multiple of 8.
/// All four warps call it. The kernel needs __launch_bounds__ with both numbers, or it is ignored (C7508).
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
/// may only touch what no kernel writes. `launch_dependents` lets the next kernel's blocks begin when every
/// block of this one has said so or ended. Neither does anything in a kernel that was launched without.
__device__ __forceinline__ void grid_dependency_wait() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}
__device__ __forceinline__ void launch_dependents() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

}  // namespace tessera::gpu
