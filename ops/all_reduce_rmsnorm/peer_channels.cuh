#pragma once

#include "gpu/row.cuh"
#include "ops/all_reduce_rmsnorm/peer_channels.h"

/// The kernels' side of peer_channels.h. Section names are those of the PTX ISA.

namespace tessera::ops::peer {

using gpu::column_of;
using gpu::kPackOf;
using gpu::Words;

/// st.relaxed.sys ("st"): two words of a message, each one access.
__device__ __forceinline__ void store_two(uint64_t* to, uint64_t a, uint64_t b) {
  asm volatile("st.relaxed.sys.global.v2.b64 [%0], {%1, %2};" ::"l"(to), "l"(a), "l"(b) : "memory");
}
/// ld.relaxed.sys ("ld"): likewise.
__device__ __forceinline__ void load_two(uint64_t& a, uint64_t& b, const uint64_t* from) {
  asm volatile("ld.relaxed.sys.global.v2.b64 {%0, %1}, [%2];" : "=l"(a), "=l"(b) : "l"(from) : "memory");
}
/// %globaltimer ("Special Registers"): nanoseconds of the GPU's clock.
__device__ __forceinline__ uint64_t nanoseconds() {
  uint64_t now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  return now;
}

/// One block's end of its channel during one call. All threads of the block make one and call finish().
class Channel {
 public:
  /// After the wait for earlier kernels: the count is the last call's.
  __device__ Channel(const PeerChannels& args, int64_t channel)
      : args_(args), channel_(channel), count_(args.counts[channel] + 1), waits_(*args.lost == 0) {}

  /// To all other ranks: the words that hold elements of a row of `width`.
  template <int kSteps, class T>
  __device__ __forceinline__ void send(const Words<T> (&share)[kSteps], int thread, int width) const {
    const uint64_t tag = uint64_t(count_) << 32;
    for (int i = 1; i < args_.ranks; ++i) {
      const int peer = args_.rank + i < args_.ranks ? args_.rank + i : args_.rank + i - args_.ranks;
      uint64_t* const to = args_.memory[peer] + args_.at(count_, args_.rank, channel_);
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        if (column_of<T, kPeerThreads>(s, thread) >= width) continue;
        uint64_t* const words = to + (s * kPeerThreads + thread) * 4;
        store_two(words, tag | share[s].word[0], tag | share[s].word[1]);
        store_two(words + 2, tag | share[s].word[2], tag | share[s].word[3]);
      }
    }
  }

  /// Waits for what rank `from` sent. False if it did not come in time, which the host is told.
  template <int kSteps, class T>
  __device__ __forceinline__ bool receive(Words<T> (&share)[kSteps], int from, int thread, int width) const {
    const uint64_t* const source = args_.memory[args_.rank] + args_.at(count_, from, channel_);
    bool all = true;
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      share[s] = {};
      if (column_of<T, kPeerThreads>(s, thread) >= width) continue;
      all = receive_words(share[s].word, source + (s * kPeerThreads + thread) * 4, from) && all;
    }
    return all;
  }

  /// The call is over. There is a barrier of the block between the constructors and this.
  __device__ __forceinline__ void finish() const {
    if (threadIdx.x == 0) args_.counts[channel_] = count_;
  }

 private:
  __device__ __forceinline__ bool receive_words(uint32_t (&words)[4], const uint64_t* from, int rank) const {
    constexpr uint32_t kPolls = 256;  // between two looks at the clock
    uint64_t got[4], begin = 0;
    for (uint32_t polls = 1;; ++polls) {
      load_two(got[0], got[1], from);
      load_two(got[2], got[3], from + 2);
      bool here = true;
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        here = here && uint32_t(got[w] >> 32) == count_;
        words[w] = uint32_t(got[w]);
      }
      if (here) return true;
      if (!waits_) return false;  // an earlier call has told the host
      if (polls % kPolls != 0 || args_.patience_ns == 0) continue;
      const uint64_t now = nanoseconds();
      if (begin == 0) begin = now;
      if (now - begin < args_.patience_ns) continue;
      *args_.lost = 1;
      asm volatile("st.relaxed.sys.global.b32 [%0], %1;" ::"l"(args_.report), "r"(rank + 1) : "memory");
      return false;
    }
  }

  const PeerChannels& args_;
  const int64_t channel_;
  const uint32_t count_;
  const bool waits_;
};

}  // namespace tessera::ops::peer
