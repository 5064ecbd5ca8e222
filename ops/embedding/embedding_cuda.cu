#include <bit>
#include <cub/device/device_radix_sort.cuh>

#include "gpu/row.cuh"
#include "ops/embedding/embedding_kernels.h"
#include "ops/indices.h"
#include "runtime/tuning.h"

/// Forward copies rows, 16 bytes a thread: one read and one write an element, bound by memory.
///
/// Backward has no atomics. The positions of the tokens are sorted by index with a stable radix sort (a few
/// bytes a token, next to rows of hundreds), so each row of the table owns a segment of the sorted list, in
/// the order of the tokens; a thread a row finds where it starts by bisection. A warp adds the rows of dy of
/// a short segment and writes the sum, or zeros: dtable is written once and never cleared. Long segments (a
/// frequent token) are added by the eight warps of a block, each every eighth term, and those eight sums in
/// order. Whether a segment is long depends on its length alone, so the order of every sum is fixed. Reads dy
/// once and writes dtable once: bound by memory, and by the longest segment where one index takes a large
/// share of all. A gradient that is there already (a table that is the head's weight too) is added to in the
/// rows that have a segment, and the others are not touched.
///
/// Few indices for few rows are not worth the sort's launches: there the warp of a row looks through all
/// indices, 32 at a time, and adds those rows of dy that are its own as it meets them.

namespace tessera::ops {
namespace {

using gpu::ceil_div;
using gpu::kPackOf;
using gpu::kWarp;
using gpu::load_row;
using gpu::store_row;

constexpr int kBlock = 256;
constexpr int kWarps = kBlock / kWarp;
constexpr int64_t kLong = 64;  // terms from which a block adds a segment

template <class T>
struct ForwardArgs {
  T* y;
  const T* table;
  Indices indices;
  int64_t y_stride, stride, count, rows, width, packs_per_row;
  bool whole;
};

template <class T>
__global__ void __launch_bounds__(kBlock) forward(ForwardArgs<T> args) {
  constexpr int kPack = kPackOf<T>;
  for (int64_t at = blockIdx.x * int64_t(kBlock) + threadIdx.x; at < args.count * args.packs_per_row;
       at += int64_t(gridDim.x) * kBlock) {
    const int64_t i = at / args.packs_per_row, first = (at - i * args.packs_per_row) * kPack;
    const int64_t row = args.indices[i];
    const bool valid = 0 <= row && row < args.rows;
    float values[kPack];
    if (valid) {
      load_row(values, args.table + row * args.stride, first, args.width, args.whole, 0.0f);
    } else {
#pragma unroll
      for (int k = 0; k < kPack; ++k) values[k] = __int_as_float(0x7FC00000);
    }
    store_row(args.y + i * args.y_stride, first, args.width, args.whole, values);
  }
}

/// What is sorted: position i under its index, or under `rows`, behind all others, if that is out of range.
__global__ void __launch_bounds__(kBlock)
    make_keys(uint32_t* keys, uint32_t* positions, Indices indices, int64_t count, int64_t rows) {
  const int64_t i = blockIdx.x * int64_t(kBlock) + threadIdx.x;
  if (i >= count) return;
  const int64_t row = indices[i];
  keys[i] = uint32_t(0 <= row && row < rows ? row : rows);
  positions[i] = uint32_t(i);
}

template <class T>
struct BackwardArgs {
  float* dtable;
  const T* dy;
  const uint32_t *starts, *positions;  // row r owns the sorted positions starts[r] ... starts[r + 1] - 1
  int64_t to_stride, stride, rows, width;
  bool whole, adds;
};

/// The sum of a pack of columns to its place in dtable.
template <int kPack, class T>
__device__ __forceinline__ void put_sum(float (&sum)[kPack], const BackwardArgs<T>& args, int64_t row,
                                        int64_t first) {
  float* const to = args.dtable + row * args.to_stride;
  if (args.adds) {
    float old[kPack];
    gpu::load_row(old, to, first, args.width, args.whole, 0.0f);
#pragma unroll
    for (int i = 0; i < kPack; ++i) sum[i] += old[i];
  }
  store_row(to, first, args.width, args.whole, sum);
}

/// starts[r]: the first place in the sorted keys whose key is r or more, for r up to `rows` itself.
__global__ void __launch_bounds__(kBlock)
    find_starts(uint32_t* starts, const uint32_t* keys, int64_t count, int64_t rows) {
  const int64_t row = blockIdx.x * int64_t(kBlock) + threadIdx.x;
  if (row > rows) return;
  int64_t begin = 0;
  while (count > 0) {
    const int64_t half = count / 2;
    if (keys[begin + half] < row) {
      begin += half + 1;
      count -= half + 1;
    } else {
      count = half;
    }
  }
  starts[row] = uint32_t(begin);
}

/// sum = the terms begin, begin + step, ... of the sorted list, of one pack of columns.
template <int kPack, class T>
__device__ __forceinline__ void add_terms(float (&sum)[kPack], const BackwardArgs<T>& args, int64_t begin,
                                          int64_t end, int step, int64_t first) {
#pragma unroll
  for (int i = 0; i < kPack; ++i) sum[i] = 0;
#pragma unroll 4
  for (int64_t at = begin; at < end; at += step) {
    float values[kPack];
    load_row(values, args.dy + int64_t(args.positions[at]) * args.stride, first, args.width, args.whole,
             0.0f);
#pragma unroll
    for (int i = 0; i < kPack; ++i) sum[i] += values[i];
  }
}

template <class T>
__global__ void __launch_bounds__(kBlock) backward(BackwardArgs<T> args) {
  constexpr int kPack = kPackOf<T>;
  __shared__ int64_t begins[kWarps], ends[kWarps];
  __shared__ float shares[kWarps][kPack][kWarp];
  const int warp = int(threadIdx.x) / kWarp, lane = int(threadIdx.x) % kWarp;
  const int64_t base = blockIdx.x * int64_t(kWarps);
  const int64_t row = base + warp;
  if (lane == 0) {
    begins[warp] = row < args.rows ? args.starts[row] : 0;
    ends[warp] = row < args.rows ? args.starts[row + 1] : 0;
  }
  __syncthreads();
  const int64_t chunks = ceil_div(args.width, kWarp * kPack);
  for (int64_t chunk = blockIdx.y; chunk < chunks; chunk += gridDim.y) {
    const int64_t first = (chunk * kWarp + lane) * kPack;
    float sum[kPack];
    const int64_t terms = ends[warp] - begins[warp];
    if (row < args.rows && terms < kLong && (terms > 0 || !args.adds)) {
      add_terms(sum, args, begins[warp], ends[warp], 1, first);
      put_sum(sum, args, row, first);
    }
    for (int own = 0; own < kWarps; ++own) {
      if (ends[own] - begins[own] < kLong) continue;
      add_terms(sum, args, begins[own] + warp, ends[own], kWarps, first);
#pragma unroll
      for (int i = 0; i < kPack; ++i) shares[warp][i][lane] = sum[i];
      __syncthreads();
      if (warp == 0) {
        for (int other = 1; other < kWarps; ++other)
#pragma unroll
          for (int i = 0; i < kPack; ++i) sum[i] += shares[other][i][lane];
        put_sum(sum, args, base + own, first);
      }
      __syncthreads();  // before the shares are written again
    }
  }
}

/// The same without a sort: a warp a row and 32 packs of columns.
template <class T>
__global__ void __launch_bounds__(kBlock) look_through(BackwardArgs<T> args, Indices indices, int64_t count) {
  constexpr int kPack = kPackOf<T>;
  const int lane = int(threadIdx.x) % kWarp;
  const int64_t row = blockIdx.x * int64_t(kWarps) + threadIdx.x / kWarp,
                first = (blockIdx.y * int64_t(kWarp) + lane) * kPack;
  if (row >= args.rows) return;
  float sum[kPack] = {};
  bool found = false;
#pragma unroll 4
  for (int64_t base = 0; base < count; base += kWarp) {
    const int64_t own = base + lane < count ? indices[base + lane] : -1;
    unsigned mask = __ballot_sync(0xFFFFFFFFu, own == row);
    if (mask == 0) continue;
    found = true;
    float some[kPack] = {};  // of these 32: one long chain of f32 would lose digits
    for (; mask != 0; mask &= mask - 1) {
      float values[kPack];
      load_row(values, args.dy + (base + __ffs(int(mask)) - 1) * args.stride, first, args.width, args.whole,
               0.0f);
#pragma unroll
      for (int i = 0; i < kPack; ++i) some[i] += values[i];
    }
#pragma unroll
    for (int i = 0; i < kPack; ++i) sum[i] += some[i];
  }
  if (found || !args.adds) put_sum(sum, args, row, first);
}

}  // namespace

void embedding_forward_cuda(const Tensor& y, const Tensor& table, const Tensor& indices) {
  dispatch_floating_cuda(table.dtype(), "embedding", [&]<class T>() {
    if (y.count() == 0) return;
    constexpr int kPack = kPackOf<T>;
    const Device device = y.device();
    const int64_t width = table.size(1), packs_per_row = ceil_div(width, kPack);
    const ForwardArgs<T> args{y.data<T>(),
                              table.data<T>(),
                              Indices(indices),
                              y.row_stride(),
                              table.row_stride(),
                              indices.count(),
                              table.size(0),
                              width,
                              packs_per_row,
                              gpu::packs(y.data<T>(), y.row_stride(), kPack) &&
                                  gpu::packs(table.data<T>(), table.row_stride(), kPack)};
    const int64_t blocks = std::min<int64_t>(ceil_div(args.count * packs_per_row, kBlock),
                                             int64_t(device.card().multiprocessors) * 32);
    gpu::launch(device, {dim3(unsigned(blocks)), kBlock}, forward<T>, args);
  });
}

void embedding_backward_cuda(const Tensor& dtable, const Tensor& dy, const Tensor& indices, bool adds) {
  dispatch_floating_cuda(dy.dtype(), "embedding", [&]<class T>() {
    if (dtable.count() == 0) return;
    constexpr int kPack = kPackOf<T>;
    // Measured: a warp takes 7 ns for 32 indices, all of them 10 us for 2^25 pairs; the sort's launches
    // take 13.
    constexpr int64_t kMostPairs = int64_t{1} << 25, kMostIndices = 1024, kMostBlocks = 65535;
    const Device device = dtable.device();
    const int64_t count = indices.count(), rows = dtable.size(0);
    BackwardArgs<T> args{dtable.data<float>(),
                         dy.data<T>(),
                         nullptr,
                         nullptr,
                         dtable.row_stride(),
                         dy.row_stride(),
                         rows,
                         dtable.size(1),
                         gpu::packs(dtable.data<float>(), dtable.row_stride(), kPackOf<float>) &&
                             gpu::packs(dy.data<T>(), dy.row_stride(), kPack),
                         adds};
    const int64_t chunks = ceil_div(args.width, kWarp * kPack);
    const auto forced = tuning::ForceRow::forced("embedding");
    const bool few = count <= kMostIndices && rows * chunks <= kMostPairs / std::max<int64_t>(count, 1);
    check(!forced || *forced != 0 || chunks <= kMostBlocks, "embedding: row look through needs at most ",
          kMostBlocks * kWarp * kPack, " columns, not ", args.width);
    if (forced ? *forced == 0 : few && chunks <= kMostBlocks) {
      gpu::launch(device, {dim3(unsigned(ceil_div(rows, kWarps)), unsigned(chunks)), kBlock}, look_through<T>,
                  args, Indices(indices), count);
      return;
    }
    const auto scratch = [&](int64_t bytes) { return Tensor::empty_packed({bytes}, DType::u8, device); };
    const Tensor arrays = scratch((4 * count + rows + 1) * int64_t(sizeof(uint32_t)));
    uint32_t* const keys = static_cast<uint32_t*>(arrays.raw());
    uint32_t *const positions = keys + count, *const sorted_keys = positions + count,
                    *const sorted_positions = sorted_keys + count, *const starts = sorted_positions + count;
    if (count > 0) {
      gpu::launch(device, {dim3(unsigned(ceil_div(count, kBlock))), kBlock}, make_keys, keys, positions,
                  Indices(indices), count, rows);
      size_t bytes = 0;
      const int bits = std::bit_width(uint64_t(rows));  // of the largest key, `rows`
      const auto sort = [&](void* temporary) {
        check(cub::DeviceRadixSort::SortPairs(temporary, bytes, keys, sorted_keys, positions,
                                              sorted_positions, int(count), 0, bits, device.stream()));
      };
      sort(nullptr);  // says how many bytes it wants
      const Tensor temporary = scratch(int64_t(bytes));
      sort(temporary.raw());
    }
    gpu::launch(device, {dim3(unsigned(ceil_div(rows + 1, kBlock))), kBlock}, find_starts, starts,
                sorted_keys, count, rows);
    args.starts = starts, args.positions = sorted_positions;
    gpu::launch(device,
                {dim3(unsigned(ceil_div(rows, kWarps)), unsigned(std::min(chunks, kMostBlocks))), kBlock},
                backward<T>, args);
  });
}

}  // namespace tessera::ops
