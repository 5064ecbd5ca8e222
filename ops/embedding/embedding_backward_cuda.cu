#include <bit>
#include <cub/device/device_radix_sort.cuh>
#include <limits>

#include "gpu/dependent_launch.cuh"
#include "gpu/grid.cuh"
#include "ops/embedding/embedding_backward.cuh"
#include "tensor/pads.h"

/// Reads dy once and writes dtable once, sums in f32 (and one rounding, if dtable is of 16 bits): bound by
/// memory. No atomics on sums. The positions of the tokens are sorted by index, stably, so that each row of
/// the table owns a segment of the sorted list, in the order of the tokens. The list is cut into chunks of
/// equal length, which a warp, or as many lanes as a row has packs, adds up one term after the other; what it
/// is of a segment that covers several chunks goes to memory as a part, and a second kernel adds the parts of
/// each such segment in a fixed order. So work is shared out evenly whether one index is all tokens or none
/// comes twice, and the order of every sum depends on the indices and the width alone. Rows without a token
/// are cleared by further warps of the first kernel; with a gradient that is there already (a table that is
/// the head's weight too) they are not touched.
///
/// Three ways to sort: up to 256 indices every block sorts for itself; up to 8192 the place of an index is
/// the number of those before it, which sixteen threads count in a kernel before; else a radix sort. Up to
/// 768 indices a block has all chunks and adds the parts too.

namespace tessera::ops {
namespace {

using namespace embedding_detail;

constexpr int kBlock = 256, kWarps = kBlock / kWarp;
constexpr int kFew = kEmbeddingFew, kFewThreads = 512;
constexpr int kSorted = 768, kSortedThreads = 768;  // indices that are sorted before, but are one block's
constexpr int kMostCounted = kEmbeddingCounted, kCounters = 16;  // threads that count for an index
constexpr int kShortChunk = 8, kWideChunk = 32;  // places: at least, and of rows of a warp's packs and more
constexpr int64_t kMostChunks = 4096;            // as far as they can be made longer
constexpr int64_t kWideWarps = 2048;  // wide rows: chunks stay shorter than kWideChunk up to so many warps
constexpr int kJoinWarps = 16, kJoinColumns = 4;

/// The key under which a position is sorted: `rows`, after all others, if its index is out of range.
__device__ __forceinline__ uint32_t key_of(int64_t index, int64_t rows) {
  return uint32_t(0 <= index && index < rows ? index : rows);
}

/// Keys and positions in one number each, so that one comparison sorts stably: (rows + 1) count is at most
/// 2^32.
__global__ void __launch_bounds__(kBlock)
    sort_by_counting(uint32_t* sorted_keys, uint32_t* positions, Indices indices, int count, int64_t rows) {
  __shared__ __align__(16) uint32_t codes[kMostCounted];
  gpu::wait_and_launch_dependents();
  const int fours = (count + 3) / 4;
#pragma unroll 8
  for (int i = int(threadIdx.x); i < 4 * fours; i += kBlock)
    codes[i] = i < count ? key_of(indices[i], rows) * uint32_t(count) + uint32_t(i) : 0xFFFFFFFFu;
  __syncthreads();
  const int own = (int(blockIdx.x) * kBlock + int(threadIdx.x)) / kCounters;
  const uint32_t code = codes[min(own, count - 1)];
  int place = 0;
#pragma unroll 4
  for (int i = int(threadIdx.x) % kCounters; i < fours; i += kCounters) {
    const uint4 four = *reinterpret_cast<const uint4*>(codes + 4 * i);
    place += int(four.x < code) + int(four.y < code) + int(four.z < code) + int(four.w < code);
  }
#pragma unroll
  for (int step = 1; step < kCounters; step *= 2) place += __shfl_xor_sync(kAllLanes, place, step);
  if (own >= count || threadIdx.x % kCounters != 0) return;
  sorted_keys[place] = code / uint32_t(count);
  positions[place] = uint32_t(own);
}

__global__ void __launch_bounds__(kBlock)
    make_keys(uint32_t* keys, uint32_t* positions, Indices indices, int64_t count, int64_t rows) {
  const int64_t i = blockIdx.x * int64_t(kBlock) + threadIdx.x;
  if (i >= count) return;
  keys[i] = key_of(indices[i], rows);
  positions[i] = uint32_t(i);
}

/// All chunks of up to kThreads indices by one block for each 32 packs of columns, the first `tiles` blocks;
/// the others clear rows. As many lanes add up a chunk as a tile has packs, `lanes`, a power of two: narrow
/// rows have more chunks, which are shorter. `keys`, `positions`: null, or sorted already.
template <class T, class Out, int kThreads>
__global__ void __launch_bounds__(kThreads)
    backward_of_few(BackwardArgs<T, Out> args, Indices indices, const uint32_t* keys,
                    const uint32_t* positions, int tiles, int lanes, int length) {
  constexpr int kPack = kPackOf<T>, kBlockWarps = kThreads / kWarp,
                kMost = kThreads == kFewThreads ? kFew : kSorted;
  __shared__ uint32_t sorted_keys[kMost], sorted_positions[kMost], raw[kThreads == kFewThreads ? kMost : 1];
  __shared__ unsigned touched[kBlockWarps];
  __shared__ float parts[kPack][kThreads];
  gpu::wait_and_launch_dependents();
  const int thread = int(threadIdx.x), warp = thread / kWarp, count = int(args.count);
  if (int(blockIdx.x) >= tiles) {
    const int64_t base = (blockIdx.x - tiles) * int64_t(args.rows_of_warp * kBlockWarps),
                  own = base + warp * args.rows_of_warp;
    const int64_t row = thread < count ? int64_t(key_of(indices[thread], args.rows)) - base : -1;
    if (thread < kBlockWarps) touched[thread] = 0;
    __syncthreads();
    if (row >= 0 && row < args.rows_of_warp * kBlockWarps)
      atomicOr(&touched[row / args.rows_of_warp], 1u << row % args.rows_of_warp);
    __syncthreads();
    const int left = int(min(max(args.rows - own, int64_t(0)), int64_t(args.rows_of_warp)));
    clear_rows(args, own, left, touched[warp]);
    return;
  }
  if constexpr (kThreads == kFewThreads) {
    const uint32_t key = thread < count ? key_of(indices[thread], args.rows) : 0;
    if (thread < count) raw[thread] = key;
    __syncthreads();
    if (thread < count) {
      int place = 0;
#pragma unroll 8
      for (int i = 0; i < count; ++i) place += raw[i] < key || (raw[i] == key && i < thread);
      sorted_keys[place] = key;
      sorted_positions[place] = uint32_t(thread);
    }
  } else if (thread < count) {
    sorted_keys[thread] = keys[thread];
    sorted_positions[thread] = positions[thread];
  }
  __syncthreads();
  const Chunks chunks{sorted_keys, sorted_positions, count, length};
  const int own = thread / lanes, rank = thread % lanes;  // the chunk
  const int64_t first = (blockIdx.x * int64_t(kWarp) + rank) * kPack;
  float sum[kPack];
  const bool exists = own * length < count;
  constexpr int kAhead = kThreads == kFewThreads ? 8 : 4;
  if (exists && walk<kAhead>(args, chunks, own, first, sum))
#pragma unroll
    for (int i = 0; i < kPack; ++i) parts[i][thread] = sum[i];
  __syncthreads();
  if (!exists || first >= args.width || !begins_parts(chunks, own)) return;
  const uint32_t row = sorted_keys[(own + 1) * length];
  if (row >= args.rows) return;
#pragma unroll
  for (int i = 0; i < kPack; ++i) sum[i] = parts[i][thread];
  for (int chunk = own + 1; chunks.is_uniform(chunk) && sorted_keys[chunk * length] == row; ++chunk)
#pragma unroll
    for (int i = 0; i < kPack; ++i) sum[i] += parts[i][chunk * lanes + rank];
  put_sum(sum, args, row, first);
}

/// Blocks x below `walkers` add up chunks, of `lanes` lanes each, the others clear rows; y: tiles of columns.
template <class T, class Out>
__global__ void __launch_bounds__(kBlock) walk_chunks(BackwardArgs<T, Out> args, Chunks chunks, int lanes,
                                                      unsigned walkers, float* parts, int64_t part_stride) {
  constexpr int kPack = kPackOf<T>;
  gpu::wait_and_launch_dependents();
  const int thread = int(threadIdx.x), lane = thread % kWarp;
  if (blockIdx.x >= walkers) {
    const int64_t block = (blockIdx.x - walkers) * int64_t(gridDim.y) + blockIdx.y,
                  base = (block * kWarps + thread / kWarp) * args.rows_of_warp;
    const int rows = int(min(max(args.rows - base, int64_t(0)), int64_t(args.rows_of_warp)));
    bool touched = false;
    if (lane < rows) {
      int low = 0, high = chunks.count;  // the first place of this row or a later one
      while (low < high) {
        const int middle = (low + high) / 2;
        if (chunks.keys[middle] < base + lane) {
          low = middle + 1;
        } else {
          high = middle;
        }
      }
      touched = low < chunks.count && chunks.keys[low] == base + lane;
    }
    return clear_rows(args, base, rows, __ballot_sync(kAllLanes, touched));
  }
  const int64_t chunk = blockIdx.x * int64_t(kBlock / lanes) + thread / lanes;
  if (chunk * chunks.length >= chunks.count) return;
  for (int64_t first = (blockIdx.y * int64_t(lanes) + thread % lanes) * kPack; first < args.width;
       first += int64_t(gridDim.y) * lanes * kPack) {
    float sum[kPack];
    if (!walk<8>(args, chunks, int(chunk), first, sum)) continue;
    float* const to = parts + chunk * part_stride + first;
#pragma unroll
    for (int i = 0; i < kPack; i += 4)
      *reinterpret_cast<float4*>(to + i) = make_float4(sum[i], sum[i + 1], sum[i + 2], sum[i + 3]);
  }
}

__device__ __forceinline__ void add(float4& sum, const float4& term) {
  sum.x += term.x, sum.y += term.y, sum.z += term.z, sum.w += term.w;
}

/// Adds the parts of the segments that begin in 32 chunks, of 128 columns. Up to 32 parts are added by a warp
/// one after the other; more by all warps, each every kJoinWarps-th, and these sums in order.
template <class T, class Out>
__global__ void __launch_bounds__(kJoinWarps* kWarp)
    join_parts(BackwardArgs<T, Out> args, Chunks chunks, int all, const float* parts, int64_t part_stride) {
  __shared__ float4 shares[kJoinWarps][kWarp];
  __shared__ int ends[kWarp];
  gpu::wait_and_launch_dependents();
  const int warp = int(threadIdx.x) / kWarp, lane = int(threadIdx.x) % kWarp, base = int(blockIdx.x) * kWarp;
  const bool begins = base + lane < all && begins_parts(chunks, base + lane) &&
                      chunks.keys[(base + lane + 1) * int64_t(chunks.length)] < args.rows;
  const unsigned mask = __ballot_sync(kAllLanes, begins);
  if (mask == 0) return;
  if (warp == 0 && begins) {  // the first chunk after that holds no part of the segment
    const uint32_t row = chunks.keys[(base + lane + 1) * int64_t(chunks.length)];
    int low = base + lane + 2, high = all;
    while (low < high) {
      const int middle = (low + high) / 2;
      if (chunks.is_uniform(middle) && chunks.keys[middle * int64_t(chunks.length)] == row) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    ends[lane] = low;
  }
  __syncthreads();
  const int64_t column = (blockIdx.y * int64_t(kWarp) + lane) * kJoinColumns;
  const auto sum_of = [&](int begin, int end, int step) {
    float4 sum = {};
    if (column < args.width)
#pragma unroll 8
      for (int part = begin; part < end; part += step)
        add(sum, *reinterpret_cast<const float4*>(parts + part * part_stride + column));
    return sum;
  };
  const auto put = [&](int own, const float4& sum) {
    float values[kJoinColumns] = {sum.x, sum.y, sum.z, sum.w};
    if (column < args.width)
      put_sum(values, args, chunks.keys[(base + own + 1) * int64_t(chunks.length)], column);
  };
  int turn = 0;
  for (unsigned left = mask; left != 0; left &= left - 1, ++turn) {
    const int own = __ffs(int(left)) - 1, begin = base + own, end = ends[own];
    if (end - begin <= kWarp) {
      if (turn % kJoinWarps == warp) put(own, sum_of(begin, end, 1));
      continue;
    }
    shares[warp][lane] = sum_of(begin + warp, end, kJoinWarps);
    __syncthreads();
    if (warp == 0) {
      float4 sum = shares[0][lane];
#pragma unroll
      for (int w = 1; w < kJoinWarps; ++w) add(sum, shares[w][lane]);
      put(own, sum);
    }
    __syncthreads();  // before the shares are written again
  }
}

template <class T, class Out>
void backward(const Tensor& dtable, const Tensor& dy, const Tensor& indices, bool adds) {
  const Device device = dtable.device();
  const int64_t count = indices.count(), rows = dtable.size(0), width = dtable.size(1),
                multiprocessors = device.multiprocessors();
  // Positions, and keys up to `rows`, are 32-bit numbers; the sort counts in int.
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  check(count <= kMost && rows < kMost, "embedding: backward of ", count, " indices into a table of ", rows,
        " rows; a GPU takes fewer than 2^31 of either (split the indices over several calls)");
  const uint32_t packs_per_row = uint32_t(ceil_div(width, kPackOf<Out>));
  // Rows a warp clears: all warps of the GPU four times.
  const int rows_of_warp = int(std::clamp<int64_t>(rows / (multiprocessors * kWarps * 4), 1, kWarp));
  const BackwardArgs<T, Out> args{
      .dtable = dtable.data<Out>(),
      .dy = dy.data<T>(),
      .to_stride = dtable.row_stride(),
      .stride = dy.row_stride(),
      .rows = rows,
      .width = width,
      .count = count,
      .to_whole = gpu::is_pack_aligned(dtable.data<Out>(), dtable.row_stride(), kPackOf<Out>),
      .whole = gpu::is_pack_aligned(dy.data<T>(), dy.row_stride(), kPackOf<T>),
      .adds = adds,
      .clears_row_padding = owns_row_padding(dtable, int64_t(packs_per_row) * kPackOf<Out>),
      .packs_per_row = packs_per_row,
      .by_packs_per_row = gpu::Divider(packs_per_row),
      .rows_of_warp = rows_of_warp};
  const int64_t packs = ceil_div(width, kPackOf<T>), tiles = ceil_div(packs, kWarp);
  const int lanes = int(std::min<uint64_t>(std::bit_ceil(uint64_t(packs)), kWarp));  // that add up a chunk
  const EmbeddingWay way = embedding_way(count, rows, Gpu(device));
  const auto few = [&]<int kThreads>(const uint32_t* keys, const uint32_t* positions) {
    constexpr int kBlockWarps = kThreads / kWarp;
    const int64_t adding = count > 0 ? tiles : 0,
                  clearing = adds ? 0 : ceil_div(rows, rows_of_warp * kBlockWarps);
    int length = kShortChunk;
    while (length * (kThreads / lanes) < count) length *= 2;
    gpu::launch_dependent(device, {gpu::grid_of(adding + clearing), kThreads},
                          backward_of_few<T, Out, kThreads>, args, Indices(indices), keys, positions,
                          int(adding), lanes, length);
  };
  if (way == EmbeddingWay::one_launch) return few.template operator()<kFewThreads>(nullptr, nullptr);
  const Tensor arrays = Tensor::empty_packed({4 * count}, DType::i32, device);
  const auto array = [&](int which) { return static_cast<uint32_t*>(arrays.raw()) + which * count; };
  uint32_t *const keys = array(0), *const positions = array(1);
  if (way == EmbeddingWay::count) {
    gpu::launch_dependent(device, {gpu::grid_of(ceil_div(count * kCounters, kBlock)), kBlock},
                          sort_by_counting, keys, positions, Indices(indices), int(count), rows);
    if (count <= kSorted) return few.template operator()<kSortedThreads>(keys, positions);
  } else if (count > 0) {
    uint32_t *const raw_keys = array(2), *const raw_positions = array(3);
    gpu::launch(device, {gpu::grid_of(ceil_div(count, kBlock)), kBlock}, make_keys, raw_keys, raw_positions,
                Indices(indices), count, rows);
    size_t bytes = 0;
    const int bits = std::bit_width(uint64_t(rows));  // of the largest key, `rows`
    const auto sort = [&](void* temporary) {
      check(cub::DeviceRadixSort::SortPairs(temporary, bytes, raw_keys, keys, raw_positions, positions,
                                            int(count), 0, bits, device.stream()));
    };
    sort(nullptr);  // queries the size of the workspace
    const Tensor temporary = Tensor::empty_packed({int64_t(bytes)}, DType::u8, device);
    sort(temporary.raw());
  }
  // A chunk is a chain of loads: few indices make short ones, so that they fill the GPU.
  int64_t length = kShortChunk;
  while (packs >= kWarp && length < kWideChunk && ceil_div(count, length) * tiles > kWideWarps) length *= 2;
  while (length * kMostChunks < count) length *= 2;
  const Chunks chunks{keys, positions, int(count), int(length)};
  const int64_t all = ceil_div(count, length), part_stride = packs * kPackOf<T>;
  const Tensor parts =
      Tensor::empty_packed(Shape{std::max<int64_t>(all, 1), part_stride}, DType::f32, device);
  const int64_t walkers = ceil_div(all, kBlock / lanes), deep = std::min<int64_t>(tiles, 65535),
                clearing = adds ? 0 : ceil_div(rows, rows_of_warp * kWarps);
  gpu::launch_dependent(device, {gpu::grid_of(walkers + ceil_div(clearing, deep), deep), kBlock},
                        walk_chunks<T, Out>, args, chunks, lanes, unsigned(walkers), parts.data<float>(),
                        part_stride);
  if (all > 1)
    gpu::launch_dependent(
        device,
        {gpu::grid_of(ceil_div(all, kWarp), ceil_div(width, kWarp * kJoinColumns)), kJoinWarps * kWarp},
        join_parts<T, Out>, args, chunks, int(all), parts.data<float>(), part_stride);
}

}  // namespace

void embedding_backward_cuda(const Tensor& dtable, const Tensor& dy, const Tensor& indices, bool adds) {
  dispatch_floating_cuda(dy.dtype(), "embedding", [&]<class T>() {
    if (dtable.count() == 0) return;
    dtable.dtype() == DType::f32 ? backward<T, float>(dtable, dy, indices, adds)
                                 : backward<T, T>(dtable, dy, indices, adds);
  });
}

}  // namespace tessera::ops
