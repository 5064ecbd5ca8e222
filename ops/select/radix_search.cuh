#pragma once

#include "gpu/launch.cuh"
#include "ops/select/select_cluster_math.h"

/// The search for the bar of a cut (select_math.h) as a radix select: three passes over the values, each of
/// which counts those that agree with the bar so far by their next 11, 11 and 10 bits, from the top, and one
/// scan of the bins for the next digit. Where enough values reach the bar is monotone in the bar, so exactly
/// one bin holds the answer. The functions are for the threads of one block and for any range of a list of
/// values: what the values are, and whether other blocks have other ranges or other lists, is up to the
/// caller.

namespace tessera::ops {

inline constexpr int kRadixBins = 2048;
inline constexpr int kRadixPasses = 3;
inline constexpr int kRadixGroup = 4;  // values that a thread has at once: one load, one Philox block

__device__ __forceinline__ int shift_of(int pass) {
  return pass == 0 ? 21 : pass == 1 ? 10 : 0;
}
__device__ __forceinline__ int bins_of(int pass) {
  return pass == 2 ? 1024 : kRadixBins;
}

/// Inclusive sums over the warp.
__device__ __forceinline__ RowTerm warp_scan(RowTerm own) {
  const int lane = int(threadIdx.x) % gpu::kWarp;
#pragma unroll
  for (int step = 1; step < gpu::kWarp; step *= 2) {
    const uint32_t chosen = __shfl_up_sync(0xFFFFFFFFu, own.chosen, step);
    const uint64_t drawable = __shfl_up_sync(0xFFFFFFFFu, own.drawable, step);
    if (lane >= step) own.chosen += chosen, own.drawable += drawable;
  }
  return own;
}

/// Adds to `before` what the threads of the block before this one have, and gives what all have.
template <int kThreads>
__device__ __forceinline__ RowTerm block_scan(RowTerm own, RowTerm& before) {
  constexpr int kWarps = kThreads / gpu::kWarp;
  __shared__ RowTerm warps[kWarps];
  const int lane = int(threadIdx.x) % gpu::kWarp, warp = int(threadIdx.x) / gpu::kWarp;
  const RowTerm mine = warp_scan(own);
  __syncthreads();  // threads may still read the last sums
  if (lane == gpu::kWarp - 1) warps[warp] = mine;
  __syncthreads();
  const RowTerm sums = warp_scan(lane < kWarps ? warps[lane] : RowTerm{});
  const auto of_lane = [&](int from) {
    return RowTerm{__shfl_sync(0xFFFFFFFFu, sums.chosen, from),
                   __shfl_sync(0xFFFFFFFFu, sums.drawable, from)};
  };
  const RowTerm earlier = of_lane(warp > 0 ? warp - 1 : 0), all = of_lane(kWarps - 1);
  before.chosen += mine.chosen - own.chosen + (warp > 0 ? earlier.chosen : 0);
  before.drawable += mine.drawable - own.drawable + (warp > 0 ? earlier.drawable : 0);
  return all;
}

/// Bins in shared memory.
template <bool kWeighted>
struct RadixBins {
  unsigned counts[kRadixBins];
  unsigned long long sums[kWeighted ? kRadixBins : 1];
};

/// Counts the values begin ... end - 1 that agree with the bar so far, by their digit of this pass.
/// `load(values, first)` gives the values first ... first + 3; past `end` they may be anything. kSkewed: many
/// lanes of a warp have the same digit.
template <bool kWeighted, bool kSkewed, int kThreads, class Load>
__device__ void count_digits(RadixBins<kWeighted>& bins, int pass, uint32_t bar, uint32_t begin, uint32_t end,
                             Load&& load) {
  for (int bin = int(threadIdx.x); bin < kRadixBins; bin += kThreads) {
    bins.counts[bin] = 0;
    if constexpr (kWeighted) bins.sums[bin] = 0;
  }
  __syncthreads();
  const int shift = shift_of(pass);
  const uint32_t mask = uint32_t(bins_of(pass)) - 1;
  const uint32_t known = pass == 0 ? 0 : ~uint32_t{0} << shift_of(pass - 1);
  // Every thread makes the same number of rounds: the vote needs whole warps.
  for (uint32_t base = begin; base < end; base += kThreads * kRadixGroup) {
    const uint32_t first = base + threadIdx.x * kRadixGroup;
    uint32_t values[kRadixGroup];
    load(values, first);
#pragma unroll
    for (int i = 0; i < kRadixGroup; ++i) {
      const uint32_t value = values[i], digit = value >> shift & mask;
      // A weight of 0 reaches no bar and adds nothing to a sum.
      const bool counts = first + i < end && (value & known) == bar && !(kWeighted && value == 0);
      if constexpr (kSkewed) {
        static_assert(!kWeighted);
        // A lane adds for all that have its digit.
        const unsigned same = __match_any_sync(0xFFFFFFFFu, counts ? digit : kRadixBins);
        if (counts && __ffs(int(same)) - 1 == int(threadIdx.x) % gpu::kWarp)
          atomicAdd(&bins.counts[digit], unsigned(__popc(same)));
      } else if (counts) {
        atomicAdd(&bins.counts[digit], 1u);
        if constexpr (kWeighted)
          if (value != kCertain) atomicAdd(&bins.sums[digit], (unsigned long long)value);
      }
    }
  }
  __syncthreads();
}

/// One more digit of the bar: the largest at which enough rows reach it. `to` is in shared memory; all
/// threads see it afterwards.
template <bool kWeighted, int kThreads>
__device__ void find_digit(RadixSearch& to, const RadixBins<kWeighted>& bins, const RadixSearch& from,
                           int pass, uint32_t k) {
  constexpr int kOwn = kRadixBins / kThreads;
  const int shift = shift_of(pass), last = bins_of(pass) - 1;
  const auto bin_of = [&](int i) { return kRadixBins - 1 - (int(threadIdx.x) * kOwn + i); };  // from the top
  const auto in_bin = [&](int bin) {
    return RowTerm{bins.counts[bin], kWeighted ? uint64_t(bins.sums[kWeighted ? bin : 0]) : 0};
  };
  RowTerm own;
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    const RowTerm term = in_bin(bin_of(i));
    own.chosen += term.chosen, own.drawable += term.drawable;
  }
  RowTerm higher{from.above, 0};
  const uint64_t sum = block_scan<kThreads>(own, higher).drawable;
  for (int i = 0; i < kOwn; ++i) {
    const int bin = bin_of(i);
    const RowTerm term = in_bin(bin);
    if (bin <= last)
      take_digit(to, from, kWeighted, k, shift, uint32_t(bin), uint32_t(last), higher, term, sum);
    higher.chosen += term.chosen, higher.drawable += term.drawable;
  }
  __syncthreads();
}

}  // namespace tessera::ops
