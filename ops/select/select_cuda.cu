#include <algorithm>

#include "gpu/dependent_launch.cuh"
#include "gpu/grid.cuh"
#include "ops/reduce/persistent.cuh"
#include "ops/select/radix_search.cuh"
#include "ops/select/select_kernels.h"

/// A selection has two halves: the search for the bar (radix_search.cuh), and a walk over the rows in index
/// order, in which the scan of how many rows are chosen and how much is drawable before a row gives the row's
/// entry in the result; no atomic decides an order. Values are made from the norms (or drawn) again in each
/// pass: 4 bytes per row from L2 are cheaper than writing them.
///
///   block  one block does all of that, its bins in shared memory: one launch. For up to 16,384 rows, see
///          select.cpp.
///   grid   a launch for each pass of the search (importance: one more for the largest exponent), one that
///          sums the terms of each chunk of rows, one that writes. The bins of all blocks are added in
///          Device::counters; the last block to arrive scans and clears them. No block waits for another.
///
/// Bound by latency, not by bytes: 36,096 norms are 144 KB. docs/ops/select.md has the predictions.

namespace tessera::ops {
namespace {

using gpu::kWarp;

constexpr int kBlockThreads = 1024, kGridThreads = 256;
constexpr int kMostChunks = 1024;  // blocks of a grid: their sums are scanned by one

// Among the counters of the stream, in words.
constexpr int kArrivedAt = 0, kLargestAt = 1, kCountsAt = 64, kSumsAt = kCountsAt + kRadixBins,
              kCounterWords = kSumsAt + 2 * kRadixBins;

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
  const uint32_t bar = min(search.bar, highest_bar(kWeighted));
  const uint32_t above = search.above + (bar < search.bar ? search.count : 0);
  return cut_at(kWeighted, bar, sizes.k, above, search.below + search.at, sizes.rows, stream.seed,
                kWeighted ? stream.offset() : 0);
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

// ---- one block ----

template <SelectMode kMode>
__global__ void __launch_bounds__(kBlockThreads) select_in_block(Args args) {
  constexpr bool kWeighted = is_weighted(kMode), kSearches = kMode != SelectMode::threshold;
  gpu::wait_and_launch_dependents();
  const Sizes sizes(args);
  uint32_t largest_exponent = 0;
  if constexpr (kWeighted) largest_exponent = largest_exponent_of<kBlockThreads>(args, 0, sizes.rows);
  Cut cut;
  if constexpr (kSearches) {
    __shared__ RadixBins<kWeighted> bins;
    __shared__ RadixSearch found[kRadixPasses];
    RadixSearch search{};
    for (int pass = 0; pass < kRadixPasses; ++pass) {
      count_digits<kWeighted, kMode == SelectMode::top_norm, kBlockThreads>(
          bins, pass, search.bar, 0, sizes.rows, [&](uint32_t(&values)[kRadixGroup], uint32_t first) {
            load_values<kMode>(values, args, first, sizes.rows, largest_exponent);
          });
      find_digit<kWeighted, kBlockThreads>(found[pass], bins, search, pass, sizes.k);
      search = found[pass];
    }
    cut = finished<kWeighted>(search, sizes, args.stream);
  } else {
    cut = threshold_cut(args);
  }
  const float certain = certain_scale<kMode>(sizes);
  const RowTerm all = walk_rows_in_order<kMode, kBlockThreads>(
      args, cut, largest_exponent, 0, sizes.rows, {},
      [&](uint32_t first, const RowTerm(&terms)[kRadixGroup], const RowTerm& before) {
        write_entries(args, cut, certain, first, terms, before);
      });
  const uint32_t count = count_of(all, cut);
  if (threadIdx.x == 0) *args.count = int32_t(count);
  write_padding(args, count);
}

// ---- the grid ----

/// The rows of this block.
struct Chunk {
  uint32_t begin, end;
  __device__ Chunk(const Args& args, uint32_t rows)
      : begin(min(blockIdx.x * args.chunk, rows)), end(min(begin + args.chunk, rows)) {}
};

__global__ void __launch_bounds__(kGridThreads) find_largest_exponent(Args args) {
  gpu::wait_and_launch_dependents();
  const Chunk chunk(args, Sizes(args).rows);
  const uint32_t largest = largest_exponent_of<kGridThreads>(args, chunk.begin, chunk.end);
  if (threadIdx.x == 0) atomicMax(&args.counters[kLargestAt], largest);
  if (!gpu::last_block(&args.counters[kArrivedAt]) || threadIdx.x > 0) return;
  args.state->largest_exponent = atomicExch(&args.counters[kLargestAt], 0u);
}

template <SelectMode kMode>
__global__ void __launch_bounds__(kGridThreads) search_in_grid(Args args, int pass) {
  constexpr bool kWeighted = is_weighted(kMode);
  __shared__ RadixBins<kWeighted> bins;
  __shared__ RadixSearch found;
  gpu::wait_and_launch_dependents();
  const Sizes sizes(args);
  const Chunk chunk(args, sizes.rows);
  const RadixSearch search = pass == 0 ? RadixSearch{} : args.state->search;
  const uint32_t largest_exponent = kWeighted ? args.state->largest_exponent : 0;
  count_digits<kWeighted, kMode == SelectMode::top_norm, kGridThreads>(
      bins, pass, search.bar, chunk.begin, chunk.end, [&](uint32_t(&values)[kRadixGroup], uint32_t first) {
        load_values<kMode>(values, args, first, chunk.end, largest_exponent);
      });
  unsigned* const counts = args.counters + kCountsAt;
  auto* const sums = reinterpret_cast<unsigned long long*>(args.counters + kSumsAt);
  for (int bin = int(threadIdx.x); bin < kRadixBins; bin += kGridThreads) {
    if (bins.counts[bin] > 0) atomicAdd(&counts[bin], bins.counts[bin]);
    if constexpr (kWeighted)
      if (bins.sums[bin] > 0) atomicAdd(&sums[bin], bins.sums[bin]);
  }
  if (!gpu::last_block(&args.counters[kArrivedAt])) return;
  for (int bin = int(threadIdx.x); bin < kRadixBins; bin += kGridThreads) {
    bins.counts[bin] = __ldcg(&counts[bin]);
    counts[bin] = 0;
    if constexpr (kWeighted) {
      bins.sums[bin] = __ldcg(&sums[bin]);
      sums[bin] = 0;
    }
  }
  __syncthreads();
  find_digit<kWeighted, kGridThreads>(found, bins, search, pass, sizes.k);
  if (threadIdx.x > 0) return;
  args.state->search = found;
  if (pass == kRadixPasses - 1) args.state->cut = finished<kWeighted>(found, sizes, args.stream);
}

template <SelectMode kMode>
__global__ void __launch_bounds__(kGridThreads) sum_chunks(Args args) {
  gpu::wait_and_launch_dependents();
  const Sizes sizes(args);
  const Chunk chunk(args, sizes.rows);
  const Cut cut = kMode == SelectMode::threshold ? threshold_cut(args) : args.state->cut;
  const RowTerm all = walk_rows_in_order<kMode, kGridThreads>(
      args, cut, is_weighted(kMode) ? args.state->largest_exponent : 0, chunk.begin, chunk.end, {},
      [](uint32_t, const RowTerm(&)[kRadixGroup], const RowTerm&) {});
  if (threadIdx.x == 0) args.chunks[blockIdx.x] = all;
  if (!gpu::last_block(&args.counters[kArrivedAt])) return;
  RowTerm base{};
  for (unsigned start = 0; start < gridDim.x; start += kGridThreads) {
    const unsigned block = start + threadIdx.x;
    RowTerm own{}, before = base;
    if (block < gridDim.x)
      own = {__ldcg(&args.chunks[block].chosen),
             __ldcg(reinterpret_cast<const unsigned long long*>(&args.chunks[block].drawable))};
    const RowTerm sum = block_scan<kGridThreads>(own, before);
    if (block < gridDim.x) args.chunks[block] = before;
    base.chosen += sum.chosen, base.drawable += sum.drawable;
  }
  if (threadIdx.x > 0) return;
  args.state->cut = cut;
  *args.count = int32_t(count_of(base, cut));
}

template <SelectMode kMode>
__global__ void __launch_bounds__(kGridThreads) write_in_grid(Args args) {
  gpu::wait_and_launch_dependents();
  const Sizes sizes(args);
  const Chunk chunk(args, sizes.rows);
  const Cut cut = args.state->cut;
  const float certain = certain_scale<kMode>(sizes);
  walk_rows_in_order<kMode, kGridThreads>(
      args, cut, is_weighted(kMode) ? args.state->largest_exponent : 0, chunk.begin, chunk.end,
      args.chunks[blockIdx.x],
      [&](uint32_t first, const RowTerm(&terms)[kRadixGroup], const RowTerm& before) {
        write_entries(args, cut, certain, first, terms, before);
      });
  write_padding(args, uint32_t(*args.count));
}

// ---- the first rows ----

__global__ void __launch_bounds__(kGridThreads) write_first(Args args) {
  gpu::wait_and_launch_dependents();
  const Sizes sizes(args);
  const uint32_t thread = blockIdx.x * kGridThreads + threadIdx.x;
  for (uint32_t entry = thread; entry < sizes.k; entry += gridDim.x * kGridThreads) {
    args.indices[entry] = int32_t(entry);
    args.scales[entry] = 1;
  }
  if (thread == 0) *args.count = int32_t(sizes.k);
  write_padding(args, sizes.k);
}

// ---- launches ----

template <SelectMode kMode>
void launch_grid(Device device, Args args) {
  const int64_t tile = kGridThreads * kRadixGroup,
                tiles = std::max<int64_t>(1, gpu::ceil_div(args.rows, tile));
  const int64_t most = std::min<int64_t>(kMostChunks, int64_t(device.multiprocessors()) * 4);
  const int64_t tiles_of_block = gpu::ceil_div(tiles, most);
  args.chunk = uint32_t(tiles_of_block * tile);
  const int64_t blocks = gpu::ceil_div(tiles, tiles_of_block);
  const gpu::LaunchShape shape{gpu::grid_of(blocks), kGridThreads};
  const Tensor state = Tensor::empty_packed({int64_t(sizeof(State))}, DType::u8, device),
               chunks = Tensor::empty_packed({blocks * int64_t(sizeof(RowTerm))}, DType::u8, device);
  args.state = static_cast<State*>(state.raw());
  args.chunks = static_cast<RowTerm*>(chunks.raw());
  args.counters = device.counters(kCounterWords);
  if constexpr (kMode != SelectMode::threshold) {
    if constexpr (is_weighted(kMode)) gpu::launch_dependent(device, shape, find_largest_exponent, args);
    for (int pass = 0; pass < kRadixPasses; ++pass)
      gpu::launch_dependent(device, shape, search_in_grid<kMode>, args, pass);
  }
  gpu::launch_dependent(device, shape, sum_chunks<kMode>, args);
  gpu::launch_dependent(device, shape, write_in_grid<kMode>, args);
}

template <SelectMode kMode>
void launch(Device device, const Args& args) {
  if (select_way(args.rows, Gpu(device)) == SelectWay::grid) return launch_grid<kMode>(device, args);
  gpu::launch_dependent(device, {dim3(1), kBlockThreads}, select_in_block<kMode>, args);
}

}  // namespace

void select_cuda(const SelectCall& call) {
  const Selection& result = call.result;
  const Device device = result.count.device();
  const auto data_of = [](const Tensor& count) { return count.defined() ? count.data<int32_t>() : nullptr; };
  Args args{};
  if (call.norms.defined()) args.norms = call.norms.data<float>();
  args.aligned = reinterpret_cast<uintptr_t>(args.norms) % sizeof(float4) == 0;
  args.device_n = data_of(call.counts.n);
  args.device_rows = data_of(call.counts.rows);
  args.indices = result.indices.data<int32_t>();
  args.scales = result.scales.data<float>();
  args.count = result.count.data<int32_t>();
  args.stream = call.stream;
  args.share = units_of_share(call.counts.share);
  args.rows = uint32_t(result.rows);
  args.capacity = uint32_t(call.n);
  args.threshold = call.threshold;
  switch (call.mode) {
    case SelectMode::first: {
      const int64_t blocks =
          std::clamp<int64_t>(gpu::ceil_div(call.n, kGridThreads), 1, int64_t(device.multiprocessors()) * 4);
      return gpu::launch_dependent(device, {gpu::grid_of(blocks), kGridThreads}, write_first, args);
    }
    case SelectMode::top_norm:
      return launch<SelectMode::top_norm>(device, args);
    case SelectMode::threshold:
      return launch<SelectMode::threshold>(device, args);
    case SelectMode::random:
      return launch<SelectMode::random>(device, args);
    case SelectMode::importance:
      return launch<SelectMode::importance>(device, args);
  }
}

}  // namespace tessera::ops
