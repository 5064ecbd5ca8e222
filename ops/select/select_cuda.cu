#include <algorithm>

#include "gpu/grid.cuh"
#include "ops/reduce/persistent.cuh"
#include "ops/select/select_cluster.cuh"
#include "ops/select/select_rows.cuh"

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
///   cluster  one launch for up to 131,072 rows (select_cluster.cuh), sm_90.
///
/// Bound by latency, not by bytes: 36,096 norms are 144 KB. docs/ops/select.md has the predictions.

namespace tessera::ops {
namespace {

constexpr int kBlockThreads = 1024, kGridThreads = 256;
constexpr int kMostChunks = 1024;  // blocks of a grid: their sums are scanned by one

// Among the counters of the stream, in words.
constexpr int kArrivedAt = 0, kLargestAt = 1, kCountsAt = 64, kSumsAt = kCountsAt + kRadixBins,
              kCounterWords = kSumsAt + 2 * kRadixBins;

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
void launch_cluster(Device device, Args args) {
  const ClusterChunks chunks(args.rows);
  args.chunk = chunks.rows;
  gpu::launch_dependent(device,
                        {.grid = dim3(unsigned(chunks.blocks)),
                         .block = dim3(kClusterThreads),
                         .shared_bytes = chunks.rows * sizeof(uint32_t),
                         .cluster = chunks.blocks},
                        select_in_cluster<kMode>, args);
}

template <SelectMode kMode>
void launch(Device device, const Args& args) {
  switch (select_way(args.rows, Gpu(device))) {
    case SelectWay::block:
      return gpu::launch_dependent(device, {dim3(1), kBlockThreads}, select_in_block<kMode>, args);
    case SelectWay::grid:
      return launch_grid<kMode>(device, args);
    case SelectWay::cluster:
      return launch_cluster<kMode>(device, args);
  }
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
