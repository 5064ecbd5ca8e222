#pragma once

#include "gpu/dependent_launch.cuh"
#include "ops/select/radix_search.cuh"
#include "ops/select/select_kernels.h"

/// What the kernels of selections have in common: arguments, the values of rows, the cut that a search has
/// found, and the entries of the result. See select_cuda.cu.

namespace tessera::ops {
namespace {

using gpu::kWarp;

/// In device memory, between the kernels of one selection.
struct State {
  RadixSearch search;
  Cut cut;
  uint32_t largest_exponent;
};

struct Args {
  const float* norms;
  const int32_t *device_n, *device_rows;  // or null
  int32_t* indices;
  float* scales;
  int32_t* count;
  unsigned* counters;
  State* state;
  RowTerm* chunks;  // of each block's rows, then of all rows before them
  RandomStream stream;
  uint64_t share;  // in units_of_share
  uint32_t rows, capacity;
  uint32_t chunk;  // rows of a block, a multiple of kGridThreads * kRadixGroup
  float threshold;
  bool aligned;  // norms start on 16 bytes
};

__device__ __forceinline__ uint32_t clamped(const int32_t* count, uint32_t most) {
  if (!count) return most;
  const int32_t value = *count;
  return value < 0 ? 0 : min(uint32_t(value), most);
}

/// The numbers of rows: those that may be chosen, and those that are.
struct Sizes {
  uint32_t rows, k;
  __device__ explicit Sizes(const Args& args)
      : rows(clamped(args.device_rows, args.rows)),
        k(min(clamped(args.device_n, args.capacity), rows_of_units(rows, args.share))) {}
};

constexpr bool is_weighted(SelectMode mode) {
  return mode == SelectMode::importance;
}

/// Values of the rows first ... first + 3, of which `rows - first` exist.
template <SelectMode kMode>
__device__ __forceinline__ void load_values(uint32_t (&values)[kRadixGroup], const Args& args, uint32_t first,
                                            uint32_t rows, uint32_t largest_exponent) {
  if constexpr (kMode == SelectMode::random) {
    const Uint4 four = RandomKeys{args.stream.seed, args.stream.offset()}.of_four(first / kRadixGroup);
#pragma unroll
    for (int i = 0; i < kRadixGroup; ++i) values[i] = four.word[i];
  } else {
    float norms[kRadixGroup];
    if (args.aligned && first + kRadixGroup <= rows) {
      const float4 four = *reinterpret_cast<const float4*>(args.norms + first);
      norms[0] = four.x, norms[1] = four.y, norms[2] = four.z, norms[3] = four.w;
    } else {
#pragma unroll
      for (int i = 0; i < kRadixGroup; ++i) norms[i] = first + i < rows ? args.norms[first + i] : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < kRadixGroup; ++i)
      values[i] = is_weighted(kMode) ? norm_weight(norms[i], largest_exponent) : norm_rank(norms[i]);
  }
}

// ---- the search ----

template <bool kWeighted>
__device__ Cut finished(const RadixSearch& search, const Sizes& sizes, const RandomStream& stream) {
  return cut_of_search(kWeighted, search, sizes.k, sizes.rows, stream.seed, kWeighted ? stream.offset() : 0);
}

__device__ __forceinline__ Cut threshold_cut(const Args& args) {
  Cut cut;
  cut.bar = norm_rank(args.threshold) - 1;
  cut.limit = args.capacity;
  return cut;
}

/// The largest exponent of rows begin ... end - 1; every thread of the block gets it.
template <int kThreads>
__device__ uint32_t largest_exponent_of(const Args& args, uint32_t begin, uint32_t end) {
  __shared__ uint32_t warps[kThreads / kWarp];
  uint32_t largest = 0;
  for (uint32_t i = begin + threadIdx.x; i < end; i += kThreads)
    largest = max(largest, norm_exponent(args.norms[i]));
  largest = __reduce_max_sync(0xFFFFFFFFu, largest);
  if (threadIdx.x % kWarp == 0) warps[threadIdx.x / kWarp] = largest;
  __syncthreads();
#pragma unroll
  for (int w = 0; w < kThreads / kWarp; ++w) largest = max(largest, warps[w]);
  return largest;
}

// ---- the result ----

/// visit(first row, terms of the thread's rows, sum of the terms before them) for the rows begin ... end - 1
/// of the block, in index order; `base` is the sum before `begin`. Returns the sum before `end`.
template <SelectMode kMode, int kThreads, class Visit>
__device__ RowTerm walk_rows_in_order(const Args& args, const Cut& cut, uint32_t largest_exponent,
                                      uint32_t begin, uint32_t end, RowTerm base, Visit&& visit) {
  for (uint32_t start = begin; start < end; start += kThreads * kRadixGroup) {
    const uint32_t first = start + threadIdx.x * kRadixGroup;
    uint32_t values[kRadixGroup];
    load_values<kMode>(values, args, first, end, largest_exponent);
    RowTerm terms[kRadixGroup], own;
#pragma unroll
    for (int i = 0; i < kRadixGroup; ++i) {
      terms[i] = first + i < end ? cut.term(values[i]) : RowTerm{};
      own.chosen += terms[i].chosen, own.drawable += terms[i].drawable;
    }
    RowTerm before = base;
    const RowTerm all = block_scan<kThreads>(own, before);
    visit(first, terms, before);
    base.chosen += all.chosen, base.drawable += all.drawable;
  }
  return base;
}

/// Writes the entries of the thread's rows. Their numbers are how many rows were chosen or drawn before.
__device__ __forceinline__ void write_entries(const Args& args, const Cut& cut, float certain, uint32_t first,
                                              const RowTerm (&terms)[kRadixGroup], RowTerm before) {
  uint32_t drawn = cut.points_before(before.drawable);
#pragma unroll
  for (int i = 0; i < kRadixGroup; ++i) {
    const RowTerm term = terms[i];
    const uint32_t entry = before.chosen + drawn;
    before.chosen += term.chosen, before.drawable += term.drawable;
    bool taken = term.chosen;
    if (term.drawable > 0) {
      const uint32_t next = cut.points_before(before.drawable);
      taken = next > drawn;
      drawn = next;
    }
    if (!taken || entry >= cut.limit) continue;
    args.indices[entry] = int32_t(first + i);
    args.scales[entry] = cut.weighted && !term.chosen ? cut.drawn_scale(term.drawable) : certain;
  }
}

/// The entries from `count` on, by all threads of the grid.
__device__ __forceinline__ void write_padding(const Args& args, uint32_t count) {
  for (uint32_t entry = count + blockIdx.x * blockDim.x + threadIdx.x; entry < args.capacity;
       entry += gridDim.x * blockDim.x) {
    args.indices[entry] = int32_t(args.rows);
    args.scales[entry] = 0;
  }
}

template <SelectMode kMode>
__device__ __forceinline__ float certain_scale(const Sizes& sizes) {
  return kMode == SelectMode::random && sizes.k > 0 ? random_scale(sizes.rows, sizes.k) : 1.0f;
}

__device__ __forceinline__ uint32_t count_of(const RowTerm& all, const Cut& cut) {
  return min(all.chosen + cut.picks, cut.limit);
}

}  // namespace
}  // namespace tessera::ops
