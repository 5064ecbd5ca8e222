#include <bit>
#include <cub/device/device_radix_sort.cuh>

#include "gpu/dependent_launch.cuh"
#include "gpu/grid.cuh"
#include "gpu/pack.cuh"
#include "ops/gather/gather_kernels.h"
#include "ops/gather/row_walk.cuh"

/// Gather: each thread moves one pack (16 bytes where rows are aligned for it, element by element elsewhere);
/// one read and one write an element, bound by memory.
///
/// Scatter without atomics. (1) The indices, those out of range replaced by `rows`, are sorted stably
/// together with their positions, so each row's positions stand together in ascending order. (2) `first[r]`,
/// where row r begins, by binary search. (3) The sorted list is cut into chunks of kChunk; a warp sums a
/// chunk for 32 packs of columns. A row that lies within one chunk is written at once; the parts of one that
/// crosses chunks go to `partial`, in f32: slot 0 for a part that another chunk began, slot 1 for one that
/// goes on in the next. (4) Rows that crossed are summed from their parts in ascending order, rows without
/// positions become zero. The order of every sum depends on the indices alone, and a row that all indices
/// name costs no more than N / kChunk steps. Bytes: x once, y once, partial at most 2 / kChunk of x in f32,
/// the sort a few passes over 16 N bytes.
///
/// Up to kFew indices of rows that lie in one run need none of that: each block keeps all of them in shared
/// memory, and the warp that writes a row finds those that name it, in ascending order, 32 at a time. One
/// launch instead of six.

namespace tessera::ops {
namespace {

constexpr int kThreads = 256;
constexpr int kChunk = 32;  // positions that a warp sums in a row: enough warps for small N, few partial sums
constexpr int kFew = 256;
constexpr int64_t kMostOfFew = int64_t(1) << 20;  // elements of a row: tiles are blocks along y

// ---- gather ----

template <class Word, class Index>
__global__ void __launch_bounds__(kThreads)
    gather_kernel(RowWalk walk, Word* y, int64_t y_stride, const Word* x, int64_t x_stride, int64_t rows,
                  const Index* indices, int64_t index_stride, int64_t total, Word filler) {
  constexpr int kPack = gpu::kPackOf<Word>;
  gpu::wait_and_launch_dependents();
  for (int64_t item = blockIdx.x * int64_t(kThreads) + threadIdx.x; item < total;
       item += int64_t(gridDim.x) * kThreads) {
    // A 64-bit division costs more than the move.
    const int64_t n = total >> 31 == 0 ? int64_t(uint32_t(item) / uint32_t(walk.packs)) : item / walk.packs;
    const RowPack pack = find_pack<kPack>(walk, item - n * walk.packs);
    const int64_t row = int64_t(indices[n * index_stride]);
    const bool inside = row >= 0 && row < rows;
    Word* const to = y + n * y_stride + pack.y;
    const Word* const from = x + (inside ? row : 0) * x_stride + pack.x;
    if (walk.aligned && pack.count == kPack) {
      gpu::Pack<Word, kPack> values;
      if (inside) {
        values = gpu::load_pack<kPack>(from);
      } else {
        for (int i = 0; i < kPack; ++i) values.at[i] = filler;
      }
      gpu::store_pack<kPack>(to, values);
    } else {
      const int inner = walk.loop.rank - 1;
      for (int i = 0; i < pack.count; ++i)
        to[i * walk.loop.strides[0][inner]] = inside ? from[i * walk.loop.strides[1][inner]] : filler;
    }
  }
}

// ---- scatter ----

template <class Index>
__global__ void __launch_bounds__(kThreads) keys_kernel(const Index* indices, int64_t stride, int64_t count,
                                                        int64_t rows, uint64_t* keys, int64_t* positions) {
  for (int64_t n = blockIdx.x * int64_t(kThreads) + threadIdx.x; n < count;
       n += int64_t(gridDim.x) * kThreads) {
    const int64_t row = int64_t(indices[n * stride]);
    keys[n] = uint64_t(row >= 0 && row < rows ? row : rows);
    positions[n] = n;
  }
}

/// first[r] = how many sorted keys are below r, for r in [0, rows].
__global__ void __launch_bounds__(kThreads)
    first_kernel(const uint64_t* keys, int64_t count, int64_t rows, int64_t* first) {
  for (int64_t row = blockIdx.x * int64_t(kThreads) + threadIdx.x; row <= rows;
       row += int64_t(gridDim.x) * kThreads) {
    int64_t low = 0, high = count;
    while (low < high) {
      const int64_t middle = low + (high - low) / 2;
      if (keys[middle] < uint64_t(row)) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    first[row] = low;
  }
}

/// Adds a pack of `count` elements to `sum`; `whole`: all kPack of them, dense and aligned.
template <int kPack, class T>
__device__ __forceinline__ void add_pack(float (&sum)[kPack], const T* from, int64_t inner, int count,
                                         bool whole) {
  if (whole) {
    const auto values = gpu::load_pack<kPack>(from);
#pragma unroll
    for (int i = 0; i < kPack; ++i) sum[i] += float(values.at[i]);
  } else {
#pragma unroll
    for (int i = 0; i < kPack; ++i)
      if (i < count) sum[i] += float(from[i * inner]);
  }
}

template <int kPack, class T>
__device__ __forceinline__ void write_sums(const RowWalk& walk, T* to, int count, const float (&sum)[kPack]) {
  if (walk.aligned && count == kPack) {
    gpu::Pack<T, kPack> values;
#pragma unroll
    for (int i = 0; i < kPack; ++i) values.at[i] = T(sum[i]);
    gpu::store_pack<kPack>(to, values);
  } else {
    const int64_t stride = walk.loop.strides[0][walk.loop.rank - 1];
#pragma unroll
    for (int i = 0; i < kPack; ++i)
      if (i < count) to[i * stride] = T(sum[i]);
  }
}

/// partial [chunks, 2, packs * kPack]; `tiles` = groups of 32 packs of a row.
template <class T>
__global__ void __launch_bounds__(kThreads)
    chunks_kernel(RowWalk walk, T* y, int64_t y_stride, const T* x, int64_t x_stride, int64_t rows,
                  const uint64_t* keys, const int64_t* positions, int64_t count, int64_t tiles, int64_t items,
                  float* partial) {
  constexpr int kPack = gpu::kPackOf<T>;
  const int lane = int(threadIdx.x) % gpu::kWarp;
  const int64_t warps = int64_t(gridDim.x) * (kThreads / gpu::kWarp);
  const int64_t x_inner = walk.loop.strides[1][walk.loop.rank - 1];
  for (int64_t item = (blockIdx.x * int64_t(kThreads) + threadIdx.x) / gpu::kWarp; item < items;
       item += warps) {
    const int64_t chunk = item / tiles, number = (item - chunk * tiles) * gpu::kWarp + lane;
    if (number >= walk.packs) continue;
    const RowPack pack = find_pack<kPack>(walk, number);
    const bool whole = walk.aligned && pack.count == kPack;
    const int64_t begin = chunk * kChunk, end = begin + kChunk < count ? begin + kChunk : count;
    float* const parts = partial + (chunk * 2 * walk.packs + number) * kPack;
    float sum[kPack] = {};
    int64_t run_begin = begin;
    for (int64_t k = begin; k < end; ++k) {
      const uint64_t row = keys[k];
      if (row == uint64_t(rows)) break;  // out of range: sorted after all others
      const T* const from = x + positions[k] * x_stride + pack.x;
      add_pack<kPack>(sum, from, x_inner, pack.count, whole);
      const bool last = k + 1 == count || keys[k + 1] != row;  // of the row's positions
      if (!last && k + 1 < end) continue;
      const bool began_before = run_begin == begin && begin > 0 && keys[begin - 1] == row;
      if (last && !began_before) {
        write_sums<kPack>(walk, y + int64_t(row) * y_stride + pack.y, pack.count, sum);
      } else {
        float* const slot = parts + (began_before ? 0 : walk.packs * kPack);
#pragma unroll
        for (int i = 0; i < kPack; ++i) slot[i] = sum[i];
      }
#pragma unroll
      for (int i = 0; i < kPack; ++i) sum[i] = 0;
      run_begin = k + 1;
    }
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    finish_kernel(RowWalk walk, T* y, int64_t y_stride, const int64_t* first, int64_t tiles, int64_t items,
                  const float* partial) {
  constexpr int kPack = gpu::kPackOf<T>;
  const int lane = int(threadIdx.x) % gpu::kWarp;
  const int64_t warps = int64_t(gridDim.x) * (kThreads / gpu::kWarp);
  for (int64_t item = (blockIdx.x * int64_t(kThreads) + threadIdx.x) / gpu::kWarp; item < items;
       item += warps) {
    const int64_t row = item / tiles, number = (item - row * tiles) * gpu::kWarp + lane;
    if (number >= walk.packs) continue;
    const int64_t begin = first[row], end = first[row + 1];
    float sum[kPack] = {};
    if (begin < end) {
      const int64_t first_chunk = begin / kChunk, last_chunk = (end - 1) / kChunk;
      if (first_chunk == last_chunk) continue;  // written already
      for (int64_t chunk = first_chunk; chunk <= last_chunk; ++chunk) {
        const int64_t slot = chunk * 2 + (chunk == first_chunk ? 1 : 0);
        const float* const part = partial + (slot * walk.packs + number) * kPack;
#pragma unroll
        for (int i = 0; i < kPack; ++i) sum[i] += part[i];
      }
    }
    const RowPack pack = find_pack<kPack>(walk, number);
    write_sums<kPack>(walk, y + row * y_stride + pack.y, pack.count, sum);
  }
}

/// All of a scatter of `count` <= kFew indices whose rows are one run. Blocks y: tiles of 32 packs; a warp
/// takes whole rows of its tile.
template <class T, class Index>
__global__ void __launch_bounds__(kThreads)
    scatter_few(RowWalk walk, T* y, int64_t y_stride, const T* x, int64_t x_stride, const Index* indices,
                int64_t index_stride, int count, int64_t rows) {
  constexpr int kPack = gpu::kPackOf<T>, kWarps = kThreads / gpu::kWarp;
  __shared__ int64_t named[kFew];
  gpu::wait_and_launch_dependents();
  for (int n = int(threadIdx.x); n < count; n += kThreads) named[n] = int64_t(indices[n * index_stride]);
  __syncthreads();
  const int lane = int(threadIdx.x) % gpu::kWarp;
  const int64_t x_inner = walk.loop.strides[1][0];
  // Lanes past the end of a row read and write its last pack as well.
  const int64_t number = min(blockIdx.y * int64_t(gpu::kWarp) + lane, walk.packs - 1);
  const int64_t at = number * kPack, left = walk.loop.sizes[0] - at;
  const RowPack pack{at * walk.loop.strides[0][0], at * x_inner, left < kPack ? int(left) : kPack};
  const bool whole = walk.aligned && pack.count == kPack;
  for (int64_t row = blockIdx.x * int64_t(kWarps) + threadIdx.x / gpu::kWarp; row < rows;
       row += gridDim.x * int64_t(kWarps)) {
    float sum[kPack] = {};
    for (int base = 0; base < count; base += gpu::kWarp) {
      unsigned matches = __ballot_sync(0xFFFFFFFFu, base + lane < count && named[base + lane] == row);
      for (; matches != 0; matches &= matches - 1) {
        const T* const from = x + (base + __ffs(int(matches)) - 1) * x_stride + pack.x;
        add_pack<kPack>(sum, from, x_inner, pack.count, whole);
      }
    }
    write_sums<kPack>(walk, y + row * y_stride + pack.y, pack.count, sum);
  }
}

gpu::LaunchShape grid_for(Device device, int64_t threads) {
  const int64_t blocks =
      std::min<int64_t>(gpu::ceil_div(threads, kThreads), int64_t(device.multiprocessors()) * 32);
  return {dim3(unsigned(blocks)), kThreads};
}

}  // namespace

void gather_rows_cuda(const Tensor& y, const Tensor& x, const Tensor& indices, OutOfRange rule) {
  const int64_t rows = x.size(0);
  dispatch_size(y.dtype(), [&]<class Word>() {
    dispatch_index(indices.dtype(), "gather_rows", [&]<class Index>() {
      const RowWalk walk = walk_rows<Word>(y, x);
      const int64_t total = y.size(0) * walk.packs;
      const Word filler = rule == OutOfRange::ones ? Word(~Word(0)) : Word(0);
      gpu::launch_dependent(y.device(), grid_for(y.device(), total), gather_kernel<Word, Index>, walk,
                            static_cast<Word*>(y.raw()), y.layout().stride(0),
                            static_cast<const Word*>(x.raw()), x.layout().stride(0), rows,
                            indices.data<Index>(), indices.layout().stride(0), total, filler);
    });
  });
}

namespace {

/// By scatter_few, or returns false where it does not take the rows.
bool scatter_rows_of_few(const Tensor& y, const Tensor& x, const Tensor& indices) {
  const Device device = y.device();
  const int64_t rows = y.size(0);
  bool taken = false;
  dispatch_floating_cuda(y.dtype(), "scatter_rows", [&]<class T>() {
    const RowWalk walk = walk_rows<T>(y, x);
    taken = walk.loop.rank == 1;
    if (!taken) return;
    const int64_t tiles = gpu::ceil_div(walk.packs, gpu::kWarp),
                  most = gpu::ceil_div(int64_t(device.multiprocessors()) * 32, tiles);
    const int64_t blocks = std::min(gpu::ceil_div(rows, kThreads / gpu::kWarp), most);
    dispatch_index(indices.dtype(), "scatter_rows", [&]<class Index>() {
      gpu::launch_dependent(device, {gpu::grid_of(blocks, tiles), kThreads}, scatter_few<T, Index>, walk,
                            y.data<T>(), y.layout().stride(0), x.data<T>(), x.layout().stride(0),
                            indices.data<Index>(), indices.layout().stride(0), int(indices.count()), rows);
    });
  });
  return taken;
}

}  // namespace

void scatter_rows_cuda(const Tensor& y, const Tensor& x, const Tensor& indices) {
  const Device device = y.device();
  const int64_t rows = y.size(0), count = indices.count();
  if (count == 0) return y.fill(0);
  if (count <= kFew && x.count() / count <= kMostOfFew && scatter_rows_of_few(y, x, indices)) return;
  const auto scratch = [&](int64_t n, DType dtype) { return Tensor::empty_packed({n}, dtype, device); };
  const Tensor keys = scratch(count, DType::i64), sorted = scratch(count, DType::i64),
               positions = scratch(count, DType::i64), order = scratch(count, DType::i64),
               first = scratch(rows + 1, DType::i64);
  const auto words = [](const Tensor& t) { return static_cast<uint64_t*>(t.raw()); };
  dispatch_index(indices.dtype(), "scatter_rows", [&]<class Index>() {
    gpu::launch(device, grid_for(device, count), keys_kernel<Index>, indices.data<Index>(),
                indices.layout().stride(0), count, rows, words(keys), positions.data<int64_t>());
  });
  const auto sort = [&](void* temporary, size_t& bytes) {
    check(cub::DeviceRadixSort::SortPairs(temporary, bytes, words(keys), words(sorted),
                                          positions.data<int64_t>(), order.data<int64_t>(), count, 0,
                                          std::bit_width(uint64_t(rows)), device.stream()));
  };
  size_t bytes = 0;
  sort(nullptr, bytes);
  const Tensor temporary = scratch(int64_t(std::max<size_t>(bytes, 1)), DType::u8);
  sort(temporary.raw(), bytes);
  gpu::launch(device, grid_for(device, rows + 1), first_kernel, words(sorted), count, rows,
              first.data<int64_t>());
  dispatch_floating_cuda(y.dtype(), "scatter_rows", [&]<class T>() {
    const RowWalk walk = walk_rows<T>(y, x);
    const int64_t tiles = gpu::ceil_div(walk.packs, gpu::kWarp), chunks = gpu::ceil_div(count, kChunk);
    const Tensor partial = scratch(chunks * 2 * walk.packs * gpu::kPackOf<T>, DType::f32);
    gpu::launch(device, grid_for(device, chunks * tiles * gpu::kWarp), chunks_kernel<T>, walk, y.data<T>(),
                y.layout().stride(0), x.data<T>(), x.layout().stride(0), rows, words(sorted),
                order.data<int64_t>(), count, tiles, chunks * tiles, partial.data<float>());
    gpu::launch(device, grid_for(device, rows * tiles * gpu::kWarp), finish_kernel<T>, walk, y.data<T>(),
                y.layout().stride(0), first.data<int64_t>(), tiles, rows * tiles, partial.data<float>());
  });
}

}  // namespace tessera::ops
