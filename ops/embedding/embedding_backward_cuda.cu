#include <bit>
#include <cub/device/device_radix_sort.cuh>

#include "ops/embedding/embedding_backward.cuh"
#include "runtime/tuning.h"

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
/// Three ways to sort: up to 256 indices every block sorts for itself and adds the parts too, in one launch;
/// up to 4096 the place of an index is the number of those before it, which a thread counts; else a radix
/// sort.

namespace tessera::ops {
namespace {

using namespace embedding_detail;

constexpr int kBlock = 256, kWarps = kBlock / kWarp;
constexpr int kMostCounted = 4096, kCountBlock = 128;
constexpr int kShortChunk = 32;        // places
constexpr int64_t kMostChunks = 4096;  // as far as they can be made longer
constexpr int kJoinWarps = 16, kJoinColumns = 4;

/// The key under which a position is sorted: `rows`, behind all others, if its index is out of range.
__device__ __forceinline__ uint32_t key_of(int64_t index, int64_t rows) {
  return uint32_t(0 <= index && index < rows ? index : rows);
}

/// The place of key `own`, that of position `at`, among keys[0, count), sorted stably.
__device__ __forceinline__ int place_of(const uint32_t* keys, int count, int at, uint32_t own) {
  int place = 0;
#pragma unroll 8
  for (int i = 0; i < count; ++i) place += keys[i] < own || (keys[i] == own && i < at);
  return place;
}

__global__ void __launch_bounds__(kCountBlock)
    sort_by_counting(uint32_t* sorted_keys, uint32_t* positions, Indices indices, int count, int64_t rows) {
  __shared__ uint32_t keys[kMostCounted];
  for (int i = int(threadIdx.x); i < count; i += kCountBlock) keys[i] = key_of(indices[i], rows);
  __syncthreads();
  const int own = int(blockIdx.x) * kCountBlock + int(threadIdx.x);
  if (own >= count) return;
  const int place = place_of(keys, count, own, keys[own]);
  sorted_keys[place] = keys[own];
  positions[place] = uint32_t(own);
}

__global__ void __launch_bounds__(kBlock)
    make_keys(uint32_t* keys, uint32_t* positions, Indices indices, int64_t count, int64_t rows) {
  const int64_t i = blockIdx.x * int64_t(kBlock) + threadIdx.x;
  if (i >= count) return;
  keys[i] = key_of(indices[i], rows);
  positions[i] = uint32_t(i);
}

/// Everything in one launch: the first `tiles` blocks add up 32 packs of columns each, the others clear rows.
template <class T, class Out>
__global__ void __launch_bounds__(kBlock)
    backward_of_few(BackwardArgs<T, Out> args, Indices indices, int tiles) {
  constexpr int kPack = kPackOf<T>;
  __shared__ uint32_t keys[kBlock], sorted[kBlock], positions[kBlock];
  __shared__ unsigned touched[kWarps];
  __shared__ float parts[kWarps][kPack][kWarp];
  const int thread = int(threadIdx.x), warp = thread / kWarp, lane = thread % kWarp, count = int(args.count);
  const uint32_t key = thread < count ? key_of(indices[thread], args.rows) : 0;
  if (int(blockIdx.x) >= tiles) {
    const int64_t base = (blockIdx.x - tiles) * int64_t(args.rows_of_warp * kWarps),
                  own = base + warp * args.rows_of_warp;
    if (thread < kWarps) touched[thread] = 0;
    __syncthreads();
    const int64_t row = int64_t(key) - base;
    if (thread < count && row >= 0 && row < args.rows_of_warp * kWarps)
      atomicOr(&touched[row / args.rows_of_warp], 1u << row % args.rows_of_warp);
    __syncthreads();
    const int left = int(min(max(args.rows - own, int64_t(0)), int64_t(args.rows_of_warp)));
    clear_rows(args, own, left, touched[warp]);
    return;
  }
  keys[thread] = key;
  __syncthreads();
  if (thread < count) {
    const int place = place_of(keys, count, thread, key);
    sorted[place] = key;
    positions[place] = uint32_t(thread);
  }
  __syncthreads();
  const Chunks chunks{sorted, positions, count, kShortChunk};
  const int64_t first = (blockIdx.x * int64_t(kWarp) + lane) * kPack;
  float sum[kPack];
  const bool exists = warp * kShortChunk < count;
  if (exists && walk(args, chunks, warp, first, sum))
#pragma unroll
    for (int i = 0; i < kPack; ++i) parts[warp][i][lane] = sum[i];
  __syncthreads();
  if (!exists || first >= args.width || !begins_parts(chunks, warp)) return;
  const uint32_t row = sorted[(warp + 1) * kShortChunk];
  if (row >= args.rows) return;
#pragma unroll
  for (int i = 0; i < kPack; ++i) sum[i] = parts[warp][i][lane];
  for (int chunk = warp + 1; chunks.is_uniform(chunk) && sorted[chunk * kShortChunk] == row; ++chunk)
#pragma unroll
    for (int i = 0; i < kPack; ++i) sum[i] += parts[chunk][i][lane];
  put_sum(sum, args, row, first);
}

/// Blocks x below `walkers` add up chunks, of `lanes` lanes each, the others clear rows; y: tiles of columns.
template <class T, class Out>
__global__ void __launch_bounds__(kBlock) walk_chunks(BackwardArgs<T, Out> args, Chunks chunks, int lanes,
                                                      unsigned walkers, float* parts, int64_t part_stride) {
  constexpr int kPack = kPackOf<T>;
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
    if (!walk(args, chunks, int(chunk), first, sum)) continue;
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
  const int warp = int(threadIdx.x) / kWarp, lane = int(threadIdx.x) % kWarp, base = int(blockIdx.x) * kWarp;
  const bool begins = base + lane < all && begins_parts(chunks, base + lane) &&
                      chunks.keys[(base + lane + 1) * int64_t(chunks.length)] < args.rows;
  const unsigned mask = __ballot_sync(kAllLanes, begins);
  if (mask == 0) return;
  if (warp == 0 && begins) {  // the first chunk behind that holds no part of the segment
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

/// Which of the three ways, by the number of indices; a row may be forced.
int way_of(int64_t count) {
  const auto forced = tuning::ForceRow::forced("embedding");
  if (!forced) return count <= kBlock ? 0 : count <= kMostCounted ? 1 : 2;
  check(*forced != 0 || count <= kBlock, "embedding: row one launch needs at most ", kBlock, " indices, not ",
        count);
  check(*forced != 1 || count <= kMostCounted, "embedding: row count needs at most ", kMostCounted,
        " indices, not ", count);
  return *forced;
}

template <class T, class Out>
void backward(const Tensor& dtable, const Tensor& dy, const Tensor& indices, bool adds) {
  const Device device = dtable.device();
  const int64_t count = indices.count(), rows = dtable.size(0), width = dtable.size(1),
                multiprocessors = device.card().multiprocessors;
  const uint32_t packs_per_row = uint32_t(ceil_div(width, kPackOf<Out>));
  // Rows a warp clears: all warps of the card four times.
  const int rows_of_warp = int(std::clamp<int64_t>(rows / (multiprocessors * kWarps * 4), 1, kWarp));
  const BackwardArgs<T, Out> args{dtable.data<Out>(),
                                  dy.data<T>(),
                                  dtable.row_stride(),
                                  dy.row_stride(),
                                  rows,
                                  width,
                                  count,
                                  gpu::packs(dtable.data<Out>(), dtable.row_stride(), kPackOf<Out>),
                                  gpu::packs(dy.data<T>(), dy.row_stride(), kPackOf<T>),
                                  adds,
                                  packs_per_row,
                                  gpu::Divider(packs_per_row),
                                  rows_of_warp};
  const int64_t packs = ceil_div(width, kPackOf<T>), tiles = ceil_div(packs, kWarp),
                clearing = adds ? 0 : ceil_div(rows, rows_of_warp * kWarps);
  const int way = way_of(count);
  if (way == 0) {
    const int64_t adding = count > 0 ? tiles : 0;
    gpu::launch(device, {dim3(unsigned(adding + clearing)), kBlock}, backward_of_few<T, Out>, args,
                Indices(indices), int(adding));
    return;
  }
  const Tensor arrays = Tensor::empty_packed({4 * count}, DType::i32, device);
  const auto array = [&](int which) { return static_cast<uint32_t*>(arrays.raw()) + which * count; };
  uint32_t *const keys = array(0), *const positions = array(1);
  if (way == 1) {
    gpu::launch(device, {dim3(unsigned(ceil_div(count, kCountBlock))), kCountBlock}, sort_by_counting, keys,
                positions, Indices(indices), int(count), rows);
  } else if (count > 0) {
    uint32_t *const raw_keys = array(2), *const raw_positions = array(3);
    gpu::launch(device, {dim3(unsigned(ceil_div(count, kBlock))), kBlock}, make_keys, raw_keys, raw_positions,
                Indices(indices), count, rows);
    size_t bytes = 0;
    const int bits = std::bit_width(uint64_t(rows));  // of the largest key, `rows`
    const auto sort = [&](void* temporary) {
      check(cub::DeviceRadixSort::SortPairs(temporary, bytes, raw_keys, keys, raw_positions, positions,
                                            int(count), 0, bits, device.stream()));
    };
    sort(nullptr);  // says how many bytes it wants
    const Tensor temporary = Tensor::empty_packed({int64_t(bytes)}, DType::u8, device);
    sort(temporary.raw());
  }
  int64_t length = kShortChunk;
  while (length * kMostChunks < count) length *= 2;
  const Chunks chunks{keys, positions, int(count), int(length)};
  const int64_t all = ceil_div(count, length), part_stride = packs * kPackOf<T>;
  const Tensor parts =
      Tensor::empty_packed(Shape{std::max<int64_t>(all, 1), part_stride}, DType::f32, device);
  const int lanes = int(std::min<uint64_t>(std::bit_ceil(uint64_t(packs)), kWarp));
  const int64_t walkers = ceil_div(all, kBlock / lanes), deep = std::min<int64_t>(tiles, 65535);
  gpu::launch(device, {dim3(unsigned(walkers + ceil_div(clearing, deep)), unsigned(deep)), kBlock},
              walk_chunks<T, Out>, args, chunks, lanes, unsigned(walkers), parts.data<float>(), part_stride);
  if (all > 1)
    gpu::launch(device,
                {dim3(unsigned(ceil_div(all, kWarp)), unsigned(ceil_div(width, kWarp * kJoinColumns))),
                 kJoinWarps * kWarp},
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
