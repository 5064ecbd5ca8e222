#include <algorithm>

#include "gpu/chain.cuh"
#include "gpu/grid.cuh"
#include "ops/reduce/persistent.cuh"
#include "ops/select/select_kernels.h"
#include "runtime/tuning.h"

/// A selection has two halves. The search for the bar (select_math.h) is a radix select: three passes over
/// the rows, each of which counts the values that agree with the bar so far by their next 11, 11 and 10 bits,
/// from the top; for importance their sums are kept as well. Where enough rows reach the bar is monotone in
/// the bar, so that one scan of the 2,048 bins gives the next digit. Then the rows are walked in index order:
/// the scan of how many rows are chosen and how much is drawable before a row gives the row's entry in the
/// result, and no atomic decides an order. Values are made from the norms (or drawn) again in each pass: 4
/// bytes per row from L2 are cheaper than writing them.
///
///   block  one block does all of that, its bins in shared memory: one launch. For up to kMostOfBlock rows.
///   grid   a launch per pass (importance: one more for the largest exponent), one that sums the terms of
///   each
///          chunk of rows, one that writes. Bins are Device::counters; the last block to arrive scans and
///          clears them. No block waits for another.
///
/// Bound by latency, not by bytes: 36,096 norms are 144 KB. docs/ops/select.md has the predictions.

namespace tessera::ops {
namespace {

using gpu::kWarp;

constexpr int kBlockThreads = 1024, kGridThreads = 256;
constexpr int kBins = 2048;
constexpr int kPasses = 3;
constexpr int64_t kMostOfBlock = 16384;  // rows; more are shared by several SMs
constexpr int kMostChunks = 1024;        // blocks of a grid: their sums are scanned by one
constexpr int kRow = 4;                  // rows of a thread: one load, one Philox block

// Among the counters of the stream, in words.
constexpr int kArrivedAt = 0, kLargestAt = 1, kCountsAt = 64, kSumsAt = kCountsAt + kBins,
              kCounterWords = kSumsAt + 2 * kBins;

__device__ __forceinline__ int shift_of(int pass) {
  return pass == 0 ? 21 : pass == 1 ? 10 : 0;
}
__device__ __forceinline__ int bins_of(int pass) {
  return pass == 2 ? 1024 : kBins;
}

/// What the search knows after a pass: the digits of the bar so far, then zeros.
struct Search {
  uint32_t bar, above;  // values above all that agree with the digits
  uint64_t below, at;   // sums of the values below those that agree, and of those that agree
  uint32_t count;       // of those that agree
};

/// In device memory, between the kernels of one selection.
struct State {
  Search search;
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
  uint32_t rows, capacity;
  uint32_t chunk;  // rows of a block, a multiple of kGridThreads * kRow
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
      : rows(clamped(args.device_rows, args.rows)), k(min(clamped(args.device_n, args.capacity), rows)) {}
};

constexpr bool is_weighted(SelectMode mode) {
  return mode == SelectMode::importance;
}

/// Values of the rows first ... first + 3, of which `rows - first` exist.
template <SelectMode kMode>
__device__ __forceinline__ void load_values(uint32_t (&values)[kRow], const Args& args, uint32_t first,
                                            uint32_t rows, uint32_t largest_exponent) {
  if constexpr (kMode == SelectMode::random) {
    const Uint4 four = RandomKeys{args.stream.seed, args.stream.offset()}.of_four(first / kRow);
#pragma unroll
    for (int i = 0; i < kRow; ++i) values[i] = four.word[i];
  } else {
    float norms[kRow];
    if (args.aligned && first + kRow <= rows) {
      const float4 four = *reinterpret_cast<const float4*>(args.norms + first);
      norms[0] = four.x, norms[1] = four.y, norms[2] = four.z, norms[3] = four.w;
    } else {
#pragma unroll
      for (int i = 0; i < kRow; ++i) norms[i] = first + i < rows ? args.norms[first + i] : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < kRow; ++i)
      values[i] = is_weighted(kMode) ? norm_weight(norms[i], largest_exponent) : norm_rank(norms[i]);
  }
}

/// Inclusive sums over the warp.
__device__ __forceinline__ RowTerm warp_scan(RowTerm own) {
  const int lane = int(threadIdx.x) % kWarp;
#pragma unroll
  for (int step = 1; step < kWarp; step *= 2) {
    const uint32_t chosen = __shfl_up_sync(0xFFFFFFFFu, own.chosen, step);
    const uint64_t drawable = __shfl_up_sync(0xFFFFFFFFu, own.drawable, step);
    if (lane >= step) own.chosen += chosen, own.drawable += drawable;
  }
  return own;
}

/// Adds to `before` what the threads of the block before this one have, and gives what all have.
template <int kThreads>
__device__ __forceinline__ RowTerm block_scan(RowTerm own, RowTerm& before) {
  constexpr int kWarps = kThreads / kWarp;
  __shared__ RowTerm warps[kWarps];
  const int lane = int(threadIdx.x) % kWarp, warp = int(threadIdx.x) / kWarp;
  const RowTerm mine = warp_scan(own);
  __syncthreads();  // threads may still read the last sums
  if (lane == kWarp - 1) warps[warp] = mine;
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

// ---- the search ----

/// Bins in shared memory.
template <bool kWeighted>
struct Bins {
  unsigned counts[kBins];
  unsigned long long sums[kWeighted ? kBins : 1];
};

/// Counts the values of rows begin ... end - 1 that agree with the bar so far, by their digit of this pass.
template <SelectMode kMode, int kThreads>
__device__ void count_digits(Bins<is_weighted(kMode)>& bins, const Args& args, int pass, uint32_t bar,
                             uint32_t largest_exponent, uint32_t begin, uint32_t end) {
  constexpr bool kWeighted = is_weighted(kMode);
  for (int bin = int(threadIdx.x); bin < kBins; bin += kThreads) {
    bins.counts[bin] = 0;
    if constexpr (kWeighted) bins.sums[bin] = 0;
  }
  __syncthreads();
  const int shift = shift_of(pass);
  const uint32_t mask = uint32_t(bins_of(pass)) - 1;
  const uint32_t known = pass == 0 ? 0 : ~uint32_t{0} << shift_of(pass - 1);
  // Every thread makes the same number of rounds: the vote needs whole warps.
  for (uint32_t base = begin; base < end; base += kThreads * kRow) {
    const uint32_t first = base + threadIdx.x * kRow;
    uint32_t values[kRow];
    load_values<kMode>(values, args, first, end, largest_exponent);
#pragma unroll
    for (int i = 0; i < kRow; ++i) {
      const uint32_t value = values[i], digit = value >> shift & mask;
      // A weight of 0 reaches no bar and adds nothing to a sum.
      const bool counts = first + i < end && (value & known) == bar && !(kWeighted && value == 0);
      if constexpr (kMode == SelectMode::top_norm) {
        // Norms share a few exponents, padding rows one value: a lane adds for all that have its digit.
        const unsigned same = __match_any_sync(0xFFFFFFFFu, counts ? digit : kBins);
        if (counts && __ffs(int(same)) - 1 == int(threadIdx.x) % kWarp)
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
__device__ void find_digit(Search& to, const Bins<kWeighted>& bins, const Search& from, int pass,
                           uint32_t k) {
  constexpr int kOwn = kBins / kThreads;
  const int shift = shift_of(pass), last = bins_of(pass) - 1;
  const auto bin_of = [&](int i) { return kBins - 1 - (int(threadIdx.x) * kOwn + i); };  // from the top
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
    const RowTerm reached{higher.chosen + term.chosen, higher.drawable + term.drawable};
    const auto holds = [&](uint32_t digit, const RowTerm& above) {
      return reaches(kWeighted, from.bar | digit << shift, k, above.chosen,
                     from.below + sum - above.drawable);
    };
    if (bin <= last && holds(uint32_t(bin), reached) && (bin == last || !holds(uint32_t(bin) + 1, higher)))
      to = {from.bar | uint32_t(bin) << shift, higher.chosen, from.below + sum - reached.drawable,
            term.drawable, term.chosen};
    higher = reached;
  }
  __syncthreads();
}

template <bool kWeighted>
__device__ Cut finished(const Search& search, const Sizes& sizes, const RandomStream& stream) {
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

/// visit(first row, values, terms before this thread's rows) for the rows begin ... end - 1 of the block, in
/// order; gives the terms of all rows before `end`.
template <SelectMode kMode, int kThreads, class Visit>
__device__ RowTerm walk_rows_in_order(const Args& args, const Cut& cut, uint32_t largest_exponent,
                                      uint32_t begin, uint32_t end, RowTerm base, Visit&& visit) {
  for (uint32_t start = begin; start < end; start += kThreads * kRow) {
    const uint32_t first = start + threadIdx.x * kRow;
    uint32_t values[kRow];
    load_values<kMode>(values, args, first, end, largest_exponent);
    RowTerm terms[kRow], own;
#pragma unroll
    for (int i = 0; i < kRow; ++i) {
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
                                              const RowTerm (&terms)[kRow], RowTerm before) {
  uint32_t drawn = cut.points_before(before.drawable);
#pragma unroll
  for (int i = 0; i < kRow; ++i) {
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
  gpu::take_turn();
  const Sizes sizes(args);
  uint32_t largest_exponent = 0;
  if constexpr (kWeighted) largest_exponent = largest_exponent_of<kBlockThreads>(args, 0, sizes.rows);
  Cut cut;
  if constexpr (kSearches) {
    __shared__ Bins<kWeighted> bins;
    __shared__ Search found[kPasses];
    Search search{};
    for (int pass = 0; pass < kPasses; ++pass) {
      count_digits<kMode, kBlockThreads>(bins, args, pass, search.bar, largest_exponent, 0, sizes.rows);
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
      [&](uint32_t first, const RowTerm(&terms)[kRow], const RowTerm& before) {
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
  gpu::take_turn();
  const Chunk chunk(args, Sizes(args).rows);
  const uint32_t largest = largest_exponent_of<kGridThreads>(args, chunk.begin, chunk.end);
  if (threadIdx.x == 0) atomicMax(&args.counters[kLargestAt], largest);
  if (!gpu::last_block(&args.counters[kArrivedAt]) || threadIdx.x > 0) return;
  args.state->largest_exponent = atomicExch(&args.counters[kLargestAt], 0u);
}

template <SelectMode kMode>
__global__ void __launch_bounds__(kGridThreads) search_in_grid(Args args, int pass) {
  constexpr bool kWeighted = is_weighted(kMode);
  __shared__ Bins<kWeighted> bins;
  __shared__ Search found;
  gpu::take_turn();
  const Sizes sizes(args);
  const Chunk chunk(args, sizes.rows);
  const Search search = pass == 0 ? Search{} : args.state->search;
  count_digits<kMode, kGridThreads>(bins, args, pass, search.bar,
                                    kWeighted ? args.state->largest_exponent : 0, chunk.begin, chunk.end);
  unsigned* const counts = args.counters + kCountsAt;
  auto* const sums = reinterpret_cast<unsigned long long*>(args.counters + kSumsAt);
  for (int bin = int(threadIdx.x); bin < kBins; bin += kGridThreads) {
    if (bins.counts[bin] > 0) atomicAdd(&counts[bin], bins.counts[bin]);
    if constexpr (kWeighted)
      if (bins.sums[bin] > 0) atomicAdd(&sums[bin], bins.sums[bin]);
  }
  if (!gpu::last_block(&args.counters[kArrivedAt])) return;
  for (int bin = int(threadIdx.x); bin < kBins; bin += kGridThreads) {
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
  if (pass == kPasses - 1) args.state->cut = finished<kWeighted>(found, sizes, args.stream);
}

template <SelectMode kMode>
__global__ void __launch_bounds__(kGridThreads) sum_chunks(Args args) {
  gpu::take_turn();
  const Sizes sizes(args);
  const Chunk chunk(args, sizes.rows);
  const Cut cut = kMode == SelectMode::threshold ? threshold_cut(args) : args.state->cut;
  const RowTerm all = walk_rows_in_order<kMode, kGridThreads>(
      args, cut, is_weighted(kMode) ? args.state->largest_exponent : 0, chunk.begin, chunk.end, {},
      [](uint32_t, const RowTerm(&)[kRow], const RowTerm&) {});
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
  gpu::take_turn();
  const Sizes sizes(args);
  const Chunk chunk(args, sizes.rows);
  const Cut cut = args.state->cut;
  const float certain = certain_scale<kMode>(sizes);
  walk_rows_in_order<kMode, kGridThreads>(
      args, cut, is_weighted(kMode) ? args.state->largest_exponent : 0, chunk.begin, chunk.end,
      args.chunks[blockIdx.x], [&](uint32_t first, const RowTerm(&terms)[kRow], const RowTerm& before) {
        write_entries(args, cut, certain, first, terms, before);
      });
  write_padding(args, uint32_t(*args.count));
}

// ---- the first rows ----

__global__ void __launch_bounds__(kGridThreads) write_first(Args args) {
  gpu::take_turn();
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
  const int64_t tile = kGridThreads * kRow, tiles = std::max<int64_t>(1, gpu::ceil_div(args.rows, tile));
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
    if constexpr (is_weighted(kMode)) gpu::launch_chained(device, shape, find_largest_exponent, args);
    for (int pass = 0; pass < kPasses; ++pass)
      gpu::launch_chained(device, shape, search_in_grid<kMode>, args, pass);
  }
  gpu::launch_chained(device, shape, sum_chunks<kMode>, args);
  gpu::launch_chained(device, shape, write_in_grid<kMode>, args);
}

template <SelectMode kMode>
void launch(Device device, const Args& args) {
  const auto forced = tuning::ForceRow::forced("select");
  const bool in_block = forced ? *forced == 0 : args.rows <= kMostOfBlock;
  if (!in_block) return launch_grid<kMode>(device, args);
  gpu::launch_chained(device, {dim3(1), kBlockThreads}, select_in_block<kMode>, args);
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
  args.rows = uint32_t(result.rows);
  args.capacity = uint32_t(call.n);
  args.threshold = call.threshold;
  switch (call.mode) {
    case SelectMode::first: {
      const int64_t blocks =
          std::clamp<int64_t>(gpu::ceil_div(call.n, kGridThreads), 1, int64_t(device.multiprocessors()) * 4);
      return gpu::launch_chained(device, {gpu::grid_of(blocks), kGridThreads}, write_first, args);
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
