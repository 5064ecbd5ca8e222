#include <algorithm>

#include "gpu/dependent_launch.cuh"
#include "gpu/grid.cuh"
#include "gpu/pack.cuh"
#include "ops/bits/bits_kernels.h"
#include "ops/bits/bits_math.h"

/// pack_bits reads x once in packs of 16 bytes and is bound by that: a warp takes kChunks times 512 bytes of
/// one row, all loads in flight before the first is used; a lane's pack gives 8 (or 4) bits, and 4 (or 8)
/// lanes put a word together by shuffles. unpack_bits writes packs of 16 bytes. transpose_bits: a ballot of
/// 32 rows' words is a word of a column. count_bits: a warp per row, 16 bytes per
/// lane and load; of a large mask it is a pure read. count_differences: a thread per word, and an atomic
/// addition per warp.
///
/// Nearest rows: a block per query walks k times over its distances and takes the least number above the last
/// one. k passes over N words that lie in L2 cost less than a heap per thread for the k that are asked for.

namespace tessera::ops {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / gpu::kWarp;
constexpr int kChunks = 4;
constexpr int64_t kMostSharedBins = 12'000;  // of a histogram: 48 KB
constexpr uint32_t kAll = 0xFFFFFFFFu;

/// Bit i: whether element i of the pack is not zero.
template <class T>
__device__ __forceinline__ uint32_t nonzero(const gpu::Words<T>& words) {
  uint32_t bits = 0;
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    if constexpr (sizeof(T) == 4) {
      bits |= uint32_t((words.word[w] & 0x7FFFFFFFu) != 0) << w;
    } else {
      bits |= uint32_t((words.word[w] & 0x7FFFu) != 0) << 2 * w;
      bits |= uint32_t((words.word[w] & 0x7FFF0000u) != 0) << (2 * w + 1);
    }
  }
  return bits;
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    pack_kernel(int32_t* bits, int64_t bits_stride, const T* x, int64_t x_stride, int columns, int groups,
                uint32_t total, bool aligned) {
  constexpr int kPack = gpu::kPackOf<T>, kLanes = 32 / kPack, kChunk = gpu::kWarp * kPack;
  gpu::wait_and_launch_dependents();
  const int lane = int(threadIdx.x) % gpu::kWarp;
  for (uint32_t item = blockIdx.x * kWarps + threadIdx.x / gpu::kWarp; item < total;
       item += gridDim.x * kWarps) {
    const uint32_t row = item / uint32_t(groups);
    const int first = int(item - row * uint32_t(groups)) * kChunks * kChunk + lane * kPack;
    const T* const from = x + int64_t(row) * x_stride;
    gpu::Words<T> words[kChunks];
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      const int column = first + chunk * kChunk, left = columns - column;
      if (aligned && left >= kPack)
        words[chunk] = gpu::load_words(from + column);
      else
        words[chunk] = gpu::load_part(from + column, max(0, min(kPack, left)));
    }
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      uint32_t word = nonzero(words[chunk]) << lane % kLanes * kPack;
#pragma unroll
      for (int step = 1; step < kLanes; step *= 2) word |= __shfl_xor_sync(kAll, word, step);
      const int column = first + chunk * kChunk;
      if (lane % kLanes == 0 && column < columns)
        bits[int64_t(row) * bits_stride + column / 32] = int32_t(word);
    }
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    unpack_kernel(T* y, int64_t y_stride, const int32_t* bits, int64_t bits_stride, int columns, int packs,
                  int64_t total, bool aligned) {
  constexpr int kPack = gpu::kPackOf<T>;
  gpu::wait_and_launch_dependents();
  for (int64_t item = blockIdx.x * int64_t(kThreads) + threadIdx.x; item < total;
       item += int64_t(gridDim.x) * kThreads) {
    const int64_t row = item / packs;
    const int column = int(item - row * packs) * kPack;
    const uint32_t word = uint32_t(bits[row * bits_stride + column / 32]) >> column % 32;
    gpu::Pack<T, kPack> values;
#pragma unroll
    for (int i = 0; i < kPack; ++i) values.at[i] = T(float(word >> i & 1));
    T* const to = y + row * y_stride + column;
    if (aligned && column + kPack <= columns) {
      gpu::store_pack<kPack>(to, values);
    } else {
#pragma unroll
      for (int i = 0; i < kPack; ++i)
        if (column + i < columns) to[i] = values.at[i];
    }
  }
}

/// A warp per word of 32 rows.
__global__ void __launch_bounds__(kThreads)
    transpose_kernel(int32_t* out, int64_t out_stride, const int32_t* bits, int64_t bits_stride, int64_t rows,
                     int64_t words, int64_t columns, int64_t total) {
  gpu::wait_and_launch_dependents();
  const int lane = int(threadIdx.x) % gpu::kWarp;
  for (int64_t item = blockIdx.x * int64_t(kWarps) + threadIdx.x / gpu::kWarp; item < total;
       item += int64_t(gridDim.x) * kWarps) {
    const int64_t group = item / words, w = item - group * words, row = 32 * group + lane;
    const uint32_t word = row < rows ? uint32_t(bits[row * bits_stride + w]) : 0;
    uint32_t mine = 0;
#pragma unroll
    for (int j = 0; j < 32; ++j) {
      const uint32_t column = __ballot_sync(kAll, word >> j & 1);
      if (lane == j) mine = column;
    }
    if (32 * w + lane < columns) out[(32 * w + lane) * out_stride + group] = int32_t(mine);
  }
}

__global__ void __launch_bounds__(kThreads)
    count_kernel(int32_t* counts, const int32_t* bits, int64_t stride, int64_t rows, int words, int packs) {
  gpu::wait_and_launch_dependents();
  const int lane = int(threadIdx.x) % gpu::kWarp;
  for (int64_t row = blockIdx.x * int64_t(kWarps) + threadIdx.x / gpu::kWarp; row < rows;
       row += int64_t(gridDim.x) * kWarps) {
    const int32_t* const from = bits + row * stride;
    int sum = 0;
#pragma unroll 4
    for (int pack = lane; pack < packs; pack += gpu::kWarp) {
      const uint4 four = *reinterpret_cast<const uint4*>(from + 4 * pack);
      sum += __popc(four.x) + __popc(four.y) + __popc(four.z) + __popc(four.w);
    }
    for (int w = 4 * packs + lane; w < words; w += gpu::kWarp) sum += __popc(uint32_t(from[w]));
    sum = __reduce_add_sync(kAll, sum);
    if (threadIdx.x % gpu::kWarp == 0) counts[row] = sum;
  }
}

/// A thread per word. Integer atomics: no order shows.
__global__ void __launch_bounds__(kThreads)
    differences_kernel(unsigned long long* sum, const int32_t* a, int64_t a_stride, const int32_t* b,
                       int64_t b_stride, int64_t words, int64_t total) {
  gpu::wait_and_launch_dependents();
  uint32_t differ = 0;
  for (int64_t item = blockIdx.x * int64_t(kThreads) + threadIdx.x; item < total;
       item += int64_t(gridDim.x) * kThreads) {
    const int64_t row = item / words, w = item - row * words;
    differ += uint32_t(__popc(uint32_t(a[row * a_stride + w] ^ b[row * b_stride + w])));
  }
  differ = __reduce_add_sync(kAll, differ);
  if (threadIdx.x % gpu::kWarp == 0 && differ > 0) atomicAdd(sum, (unsigned long long)differ);
}

// ---- all pairs, variant popc: 64 x 64 pairs per block, 4 x 4 per thread, 32 words at a time ----

constexpr int kSide = 64, kDepth = 32;

__global__ void __launch_bounds__(kThreads)
    popc_kernel(uint32_t* out, int64_t out_stride, const int32_t* a, int64_t a_stride, const int32_t* b,
                int64_t b_stride, const int32_t* of_a, const int32_t* of_b, int m, int n, int words,
                int tiles_n, BitMeasure measure, bool mirrored) {
  __shared__ uint32_t rows_a[kDepth][kSide + 1], rows_b[kDepth][kSide + 1];
  gpu::wait_and_launch_dependents();
  const int m0 = int(blockIdx.x) / tiles_n * kSide, n0 = int(blockIdx.x) % tiles_n * kSide;
  if (mirrored && n0 < m0) return;
  const int x = int(threadIdx.x) % 16, y = int(threadIdx.x) / 16;
  uint32_t both[4][4] = {};
  for (int first = 0; first < words; first += kDepth) {
    for (int at = int(threadIdx.x); at < kSide * kDepth; at += kThreads) {
      const int row = at / kDepth, w = at % kDepth;
      const bool inside = first + w < words;
      rows_a[w][row] = inside && m0 + row < m ? uint32_t(a[(m0 + row) * a_stride + first + w]) : 0;
      rows_b[w][row] = inside && n0 + row < n ? uint32_t(b[(n0 + row) * b_stride + first + w]) : 0;
    }
    __syncthreads();
#pragma unroll 4
    for (int w = 0; w < kDepth; ++w) {
      uint32_t word_a[4], word_b[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) word_a[i] = rows_a[w][y + 16 * i], word_b[i] = rows_b[w][x + 16 * i];
#pragma unroll
      for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) both[i][j] += uint32_t(__popc(word_a[i] & word_b[j]));
    }
    __syncthreads();
  }
#pragma unroll
  for (int i = 0; i < 4; ++i)
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int row = m0 + y + 16 * i, column = n0 + x + 16 * j;
      if (row >= m || column >= n) continue;
      const bool counted = measure != BitMeasure::overlap;
      const uint32_t value = pair_value(measure, counted ? uint32_t(of_a[row]) : 0,
                                        counted ? uint32_t(of_b[column]) : 0, both[i][j]);
      out[row * out_stride + column] = value;
      if (mirrored && n0 > m0) out[column * out_stride + row] = value;
    }
}

// ---- what is made of distances ----

__global__ void __launch_bounds__(kThreads)
    nearest_kernel(int32_t* indices, int32_t* distances, const int32_t* from, int64_t stride, int n, int k) {
  __shared__ uint64_t of_warp[kWarps];
  gpu::wait_and_launch_dependents();
  const int64_t row = blockIdx.x;
  from += row * stride, indices += row * k, distances += row * k;
  uint64_t last = 0;  // the next entry is at least this
  for (int entry = 0; entry < k; ++entry) {
    uint64_t least = ~uint64_t{0};
    for (int64_t j = threadIdx.x; j < n; j += kThreads) {  // n may be close to 2^31
      const uint64_t key = nearness(uint32_t(from[j]), uint32_t(j));
      if (key >= last) least = min(least, key);
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) least = min(least, __shfl_xor_sync(kAll, least, step));
    if (threadIdx.x % gpu::kWarp == 0) of_warp[threadIdx.x / gpu::kWarp] = least;
    __syncthreads();
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) least = min(least, of_warp[warp]);
    __syncthreads();
    if (threadIdx.x == 0) {
      indices[entry] = int32_t(uint32_t(least));
      distances[entry] = int32_t(least >> 32);
    }
    last = least + 1;
  }
}

/// Adds the pairs (first + row, j) with j > first + row. Most distances are nearly equal, so a block counts
/// in shared memory, if it has room for all bins, and adds to global memory once. Integer atomics: no order
/// shows.
template <bool kShared>
__global__ void __launch_bounds__(kThreads)
    histogram_kernel(unsigned long long* histogram, const int32_t* distances, int64_t stride, int64_t first,
                     int64_t rows, int n, int bins) {
  extern __shared__ uint32_t counts[];
  gpu::wait_and_launch_dependents();
  if constexpr (kShared) {
    for (int bin = int(threadIdx.x); bin < bins; bin += kThreads) counts[bin] = 0;
    __syncthreads();
  }
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x)
    for (int64_t j = first + row + 1 + threadIdx.x; j < n; j += kThreads) {
      const int32_t distance = distances[row * stride + j];
      if constexpr (kShared)
        atomicAdd(&counts[distance], 1u);
      else
        atomicAdd(&histogram[distance], 1ull);
    }
  if constexpr (kShared) {
    __syncthreads();
    for (int bin = int(threadIdx.x); bin < bins; bin += kThreads)
      if (counts[bin] > 0) atomicAdd(&histogram[bin], (unsigned long long)counts[bin]);
  }
}

int64_t blocks_for(Device device, int64_t items, int64_t of_block) {
  return std::min<int64_t>(gpu::ceil_div(items, of_block), int64_t(device.multiprocessors()) * 16);
}

}  // namespace

void pack_bits_cuda(const Tensor& bits, const Tensor& x) {
  const Device device = x.device();
  dispatch_floating_cuda(x.dtype(), "pack_bits", [&]<class T>() {
    constexpr int kPack = gpu::kPackOf<T>;
    const int64_t groups = gpu::ceil_div(x.size(1), kChunks * gpu::kWarp * kPack), total = x.size(0) * groups;
    check(total < int64_t{1} << 31, "pack_bits: x is ", describe(x), "; a launch takes at most ",
          (int64_t{1} << 31) * kChunks * gpu::kWarp * kPack, " elements (split the rows over several calls)");
    gpu::launch_dependent(device, {gpu::grid_of(blocks_for(device, total, kWarps)), kThreads}, pack_kernel<T>,
                          bits.data<int32_t>(), bits.row_stride(), x.data<T>(), x.row_stride(),
                          int(x.size(1)), int(groups), uint32_t(total),
                          gpu::is_pack_aligned(x.data<T>(), x.row_stride(), kPack));
  });
}

void unpack_bits_cuda(const Tensor& y, const Tensor& bits) {
  const Device device = y.device();
  dispatch_floating_cuda(y.dtype(), "unpack_bits", [&]<class T>() {
    constexpr int kPack = gpu::kPackOf<T>;
    const int64_t packs = gpu::ceil_div(y.size(1), kPack), total = y.size(0) * packs;
    gpu::launch_dependent(device, {gpu::grid_of(blocks_for(device, total, kThreads)), kThreads},
                          unpack_kernel<T>, y.data<T>(), y.row_stride(), bits.data<int32_t>(),
                          bits.row_stride(), int(y.size(1)), int(packs), total,
                          gpu::is_pack_aligned(y.data<T>(), y.row_stride(), kPack));
  });
}

void transpose_bits_cuda(const Tensor& out, const Tensor& bits) {
  const Device device = bits.device();
  const int64_t total = out.size(1) * bits.size(1);
  gpu::launch_dependent(device, {gpu::grid_of(blocks_for(device, total, kWarps)), kThreads}, transpose_kernel,
                        out.data<int32_t>(), out.row_stride(), bits.data<int32_t>(), bits.row_stride(),
                        bits.size(0), bits.size(1), out.size(0), total);
}

void count_bits_cuda(const Tensor& counts, const Tensor& bits) {
  const Device device = bits.device();
  const int words = int(bits.size(1));
  const int packs = gpu::is_pack_aligned(bits.data<int32_t>(), bits.row_stride(), 4) ? words / 4 : 0;
  gpu::launch_dependent(device, {gpu::grid_of(blocks_for(device, bits.size(0), kWarps)), kThreads},
                        count_kernel, counts.data<int32_t>(), bits.data<int32_t>(), bits.row_stride(),
                        bits.size(0), words, packs);
}

void count_differences_cuda(const Tensor& sum, const Tensor& a, const Tensor& b) {
  const Device device = a.device();
  gpu::launch_dependent(device, {gpu::grid_of(blocks_for(device, a.count(), kThreads)), kThreads},
                        differences_kernel, reinterpret_cast<unsigned long long*>(sum.data<int64_t>()),
                        a.data<int32_t>(), a.row_stride(), b.data<int32_t>(), b.row_stride(), a.size(1),
                        a.count());
}

void bit_pairs_popc(const BitPairs& call) {
  const Device device = call.a.device();
  const auto counts = [](const Tensor& of) { return of.defined() ? of.data<int32_t>() : nullptr; };
  const int64_t tiles_m = gpu::ceil_div(call.a.size(0), kSide),
                tiles_n = gpu::ceil_div(call.b.size(0), kSide);
  gpu::launch_dependent(device, {gpu::grid_of(tiles_m * tiles_n), kThreads}, popc_kernel,
                        static_cast<uint32_t*>(call.out.raw()), call.out.row_stride(), call.a.data<int32_t>(),
                        call.a.row_stride(), call.b.data<int32_t>(), call.b.row_stride(), counts(call.of_a),
                        counts(call.of_b), int(call.a.size(0)), int(call.b.size(0)), int(call.a.size(1)),
                        int(tiles_n), call.measure, call.mirrored);
}

void nearest_of_distances_cuda(const NearestRows& out, const Tensor& distances, int64_t first) {
  const int64_t k = out.indices.size(1);
  gpu::launch_dependent(distances.device(), {gpu::grid_of(distances.size(0)), kThreads}, nearest_kernel,
                        out.indices.data<int32_t>() + first * k, out.distances.data<int32_t>() + first * k,
                        distances.data<int32_t>(), distances.row_stride(), int(distances.size(1)), int(k));
}

void add_to_histogram_cuda(const Tensor& histogram, const Tensor& distances, int64_t first) {
  const Device device = distances.device();
  const int64_t bins = histogram.count(), rows = distances.size(0);
  const auto run = [&](auto* kernel, int64_t blocks, size_t shared_bytes) {
    gpu::launch_dependent(
        device, {.grid = gpu::grid_of(blocks), .block = kThreads, .shared_bytes = shared_bytes}, kernel,
        reinterpret_cast<unsigned long long*>(histogram.data<int64_t>()), distances.data<int32_t>(),
        distances.row_stride(), first, rows, int(distances.size(1)), int(bins));
  };
  if (bins <= kMostSharedBins)
    run(histogram_kernel<true>, std::min<int64_t>(rows, 4 * int64_t(device.multiprocessors())),
        size_t(bins) * sizeof(uint32_t));
  else
    run(histogram_kernel<false>, rows, 0);
}

}  // namespace tessera::ops
