#pragma once

#include "gpu/shared.cuh"
#include "ops/select/select_cluster_math.h"
#include "ops/select/select_rows.cuh"

/// A selection by one cluster of up to eight blocks, in one launch. Each block holds the values of its rows
/// in shared memory: norms are read once (importance: twice, the largest exponent comes first). The search
/// counts digits of 8 bits in shared memory, four passes; after a pass every block adds up the bins of all
/// blocks, over distributed shared memory, and finds the same digit from the same integers, so nothing is
/// sent back. Then the blocks exchange how many rows they choose and how much they draw, and write their
/// entries.
///
/// Bound by latency: six barriers of the cluster (importance: seven) and the passes over shared memory
/// between them. The bins are used in turn, so that a block that is ahead clears those that no block reads:
/// it has passed the barrier after which all had read them.
///
/// Norms share exponents, and in a training step most weights are much smaller than the largest, so that most
/// lanes of a warp have the same digit. The warp adds for the first two different digits together, with
/// reductions that all its lanes take part in; lanes with others add for themselves.

namespace tessera::ops {
namespace {

constexpr int kClusterThreads = 1024;
constexpr int kJoinedDigits = 2;  // of a warp, for which its lanes add together

/// Counts and sums of the digits of a block's rows.
struct DigitBins {
  uint32_t counts[kDigits];
  uint32_t low[kDigits], high[kDigits];  // of weights: joined_sum
};

/// ld.shared::cluster ("ld") of a word at this place in the shared memory of block `rank`.
__device__ __forceinline__ uint32_t word_of_block(const uint32_t* word, uint32_t rank) {
  uint32_t value;
  asm volatile("ld.shared::cluster.u32 %0, [%1];"
               : "=r"(value)
               : "r"(gpu::cluster_address(gpu::shared_address(word), rank))
               : "memory");
  return value;
}

/// A barrier of the cluster after code in which lanes of a warp may have taken different ways: it is for
/// whole warps.
__device__ __forceinline__ void sync_cluster() {
  __syncwarp();
  gpu::cluster_sync();
}

/// Adds a warp's values to the bins; all its lanes call it, those without a value with `counts` false.
template <bool kWeighted, bool kSkewed>
__device__ __forceinline__ void add_digits(DigitBins& bins, bool counts, uint32_t digit, uint32_t value) {
  constexpr unsigned kAll = 0xFFFFFFFFu;
  const int lane = int(threadIdx.x) % kWarp;
  const bool sums = kWeighted && value != kCertain;
  unsigned left = __ballot_sync(kAll, counts);
  if constexpr (kSkewed) {
    for (int round = 0; round < kJoinedDigits && left != 0; ++round) {  // the same in all lanes
      const uint32_t shared = __shfl_sync(kAll, digit, __ffs(int(left)) - 1);
      const bool mine = (left >> lane & 1) != 0 && digit == shared;
      const unsigned group = __ballot_sync(kAll, mine);
      uint32_t low = 0, high = 0;
      if constexpr (kWeighted) {
        low = __reduce_add_sync(kAll, mine && sums ? value & 0xFFFFu : 0u);
        high = __reduce_add_sync(kAll, mine && sums ? value >> 16 : 0u);
      }
      if (lane == 0) {
        atomicAdd(&bins.counts[shared], unsigned(__popc(group)));
        if constexpr (kWeighted) {
          atomicAdd(&bins.low[shared], low);
          atomicAdd(&bins.high[shared], high);
        }
      }
      __syncwarp();
      left &= ~group;
    }
  }
  if ((left >> lane & 1) != 0) {
    atomicAdd(&bins.counts[digit], 1u);
    if (sums) {
      atomicAdd(&bins.low[digit], value & 0xFFFFu);
      atomicAdd(&bins.high[digit], value >> 16);
    }
  }
  __syncwarp();
}

/// The counts of a block's values that agree with the bar so far, by their digit of this pass.
template <bool kWeighted, bool kSkewed>
__device__ void count_chunk(DigitBins& bins, const uint32_t* values, uint32_t count, int pass, uint32_t bar) {
  if (threadIdx.x < kDigits) bins.counts[threadIdx.x] = bins.low[threadIdx.x] = bins.high[threadIdx.x] = 0;
  __syncthreads();
  const uint32_t known = digits_known(pass);
  // Every thread makes the same number of rounds: the votes need whole warps.
  for (uint32_t start = 0; start < count; start += kClusterThreads) {
    const uint32_t i = start + threadIdx.x, value = i < count ? values[i] : 0;
    // A weight of 0 reaches no bar and adds nothing to a sum.
    const bool counts = i < count && (value & known) == bar && !(kWeighted && value == 0);
    add_digits<kWeighted, kSkewed>(bins, counts, value >> digit_shift(pass) & (kDigits - 1), value);
  }
}

/// The search with one more digit, from the bins of all blocks: four neighbouring threads have a digit, from
/// the top, and a part of the blocks each.
template <bool kWeighted>
__device__ RadixSearch find_digit_of_cluster(const DigitBins& bins, const RadixSearch& from, int pass,
                                             uint32_t k) {
  constexpr int kParts = kClusterThreads / kDigits;
  __shared__ RadixSearch found;
  const uint32_t digit = kDigits - 1 - threadIdx.x / kParts, part = threadIdx.x % kParts;
  uint32_t count = 0, low = 0, high = 0;
  for (uint32_t rank = part; rank < gridDim.x; rank += kParts) {
    count += word_of_block(&bins.counts[digit], rank);
    if constexpr (kWeighted) {
      low += word_of_block(&bins.low[digit], rank);
      high += word_of_block(&bins.high[digit], rank);
    }
  }
  RowTerm own{count, joined_sum(low, high)}, higher{from.above, 0};
  const uint64_t sum = block_scan<kClusterThreads>(own, higher).drawable;
  // `higher` holds what the threads before have; the digit's own parts are those of its four threads.
#pragma unroll
  for (int step = 1; step < kParts; step *= 2) {
    own.chosen += __shfl_xor_sync(0xFFFFFFFFu, own.chosen, step);
    own.drawable += __shfl_xor_sync(0xFFFFFFFFu, own.drawable, step);
  }
  if (part == 0)
    take_digit(found, from, kWeighted, k, digit_shift(pass), digit, kDigits - 1, higher, own, sum);
  __syncthreads();
  return found;
}

/// What the rows of each block add up to.
struct ChunkTotal {
  uint32_t chosen, low, high;  // and the two halves of the drawable sum

  __device__ __forceinline__ RowTerm of_block(uint32_t rank) const {
    return {word_of_block(&chosen, rank), word_of_block(&low, rank) | uint64_t(word_of_block(&high, rank))
                                                                          << 32};
  }
};

__device__ __forceinline__ RowTerm of_lane(const RowTerm& term, int lane) {
  return {__shfl_sync(0xFFFFFFFFu, term.chosen, lane), __shfl_sync(0xFFFFFFFFu, term.drawable, lane)};
}

template <SelectMode kMode>
__global__ void __launch_bounds__(kClusterThreads, 1) select_in_cluster(Args args) {
  constexpr bool kWeighted = is_weighted(kMode), kSearches = kMode != SelectMode::threshold;
  extern __shared__ __align__(16) uint32_t values[];  // (args.chunk)
  __shared__ ChunkTotal total;
  __shared__ uint32_t largest;
  gpu::wait_and_launch_dependents();
  const Sizes sizes(args);
  const uint32_t rank = gpu::cluster_rank(), blocks = gridDim.x, lane = threadIdx.x % kWarp;
  const uint32_t begin = min(rank * args.chunk, sizes.rows),
                 count = min(args.chunk, sizes.rows - begin);  // the rows of this block

  uint32_t largest_exponent = 0;
  if constexpr (kWeighted) {
    const uint32_t own = largest_exponent_of<kClusterThreads>(args, begin, begin + count);
    if (threadIdx.x == 0) largest = own;
    sync_cluster();
    largest_exponent = __reduce_max_sync(0xFFFFFFFFu, lane < blocks ? word_of_block(&largest, lane) : 0u);
  }
  for (uint32_t first = threadIdx.x * kRadixGroup; first < count; first += kClusterThreads * kRadixGroup) {
    uint32_t four[kRadixGroup];
    load_values<kMode>(four, args, begin + first, begin + count, largest_exponent);
    *reinterpret_cast<uint4*>(values + first) = make_uint4(four[0], four[1], four[2], four[3]);
  }
  __syncthreads();

  // Search: four digits, each from the bins of all blocks.
  Cut cut;
  if constexpr (kSearches) {
    __shared__ DigitBins bins[2];
    RadixSearch search{};
    for (int pass = 0; pass < kDigitPasses; ++pass) {
      DigitBins& own = bins[pass % 2];
      count_chunk<kWeighted, kMode != SelectMode::random>(own, values, count, pass, search.bar);
      sync_cluster();
      search = find_digit_of_cluster<kWeighted>(own, search, pass, sizes.k);
    }
    cut = finished<kWeighted>(search, sizes, args.stream);
  } else {
    cut = threshold_cut(args);
  }

  // What each block chooses and draws; the sums before this block.
  RowTerm own{}, before{};
  for (uint32_t i = threadIdx.x; i < count; i += kClusterThreads) {
    const RowTerm term = cut.term(values[i]);
    own.chosen += term.chosen, own.drawable += term.drawable;
  }
  const RowTerm mine = block_scan<kClusterThreads>(own, before);
  if (threadIdx.x == 0) total = {mine.chosen, uint32_t(mine.drawable), uint32_t(mine.drawable >> 32)};
  sync_cluster();
  // A lane has a block's total; those before this block are summed up in the lane before its own.
  const RowTerm totals = warp_scan(lane < blocks ? total.of_block(lane) : RowTerm{});
  const RowTerm all = of_lane(totals, kWarp - 1);
  RowTerm base = of_lane(totals, rank > 0 ? int(rank) - 1 : 0);
  if (rank == 0) base = {};
  __syncwarp();
  gpu::cluster_arrive();  // no block may exit before the others have read its shared memory

  // Entries, in index order.
  const float certain = certain_scale<kMode>(sizes);
  for (uint32_t start = 0; start < count; start += kClusterThreads * kRadixGroup) {
    const uint32_t first = start + threadIdx.x * kRadixGroup;
    RowTerm terms[kRadixGroup], of_thread;
#pragma unroll
    for (uint32_t i = 0; i < kRadixGroup; ++i) {
      terms[i] = first + i < count ? cut.term(values[first + i]) : RowTerm{};
      of_thread.chosen += terms[i].chosen, of_thread.drawable += terms[i].drawable;
    }
    RowTerm at = base;
    const RowTerm round = block_scan<kClusterThreads>(of_thread, at);
    write_entries(args, cut, certain, begin + first, terms, at);
    base.chosen += round.chosen, base.drawable += round.drawable;
  }
  const uint32_t chosen = count_of(all, cut);
  if (rank == 0 && threadIdx.x == 0) *args.count = int32_t(chosen);
  write_padding(args, chosen);
  __syncwarp();
  gpu::cluster_wait();
}

}  // namespace
}  // namespace tessera::ops
