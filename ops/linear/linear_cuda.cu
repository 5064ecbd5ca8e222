#include <algorithm>

#include "gpu/pack.cuh"
#include "gpu/partial_sums.cuh"
#include "ops/linear/linear_kernels.h"

/// Column sums, for the gradients of biases: one read an element, bound by memory.
///
/// A block takes a chunk of rows, whole ones as far as its threads reach: thread t has pack t % packs of
/// every (t / packs)-th row (a pack is 16 bytes where the rows are aligned for it, else one element), so that
/// a warp reads what lies together, whatever the width, and keeps four loads in flight. The sums of a column
/// are added in order through shared memory. Chunks are as many as fill the GPU; their sums are rows that a
/// second, small kernel adds. No atomics: the order depends only on the shape and the GPU.

namespace tessera::ops {
namespace {

constexpr int kMostThreads = 512;
constexpr int kAhead = 4;  // rows whose loads a thread has in flight together

/// x [rows, groups, columns] as the kernel sees it.
template <class T>
struct Columns {
  const T* x;
  int64_t rows, groups, columns, row_stride, group_stride;
  int64_t tiles;                   // blocks along the columns
  int packs, ways;                 // of a block: packs of a row, rows at once
  int64_t chunks, rows_per_chunk;  // blocks along the rows
};

/// sums[chunk][group][column]; one block for each (chunk, group, tile), the tile fastest
template <class T, int kPack>
__global__ void __launch_bounds__(kMostThreads, 2) column_sums_kernel(Columns<T> c, float* sums) {
  __shared__ float partial[kMostThreads * kPack];
  const int64_t tile = blockIdx.x % c.tiles, group = blockIdx.x / c.tiles % c.groups,
                chunk = blockIdx.x / c.tiles / c.groups;
  const int pack = int(threadIdx.x) % c.packs, way = int(threadIdx.x) / c.packs;
  const int64_t first = tile * (c.packs * kPack), column = first + pack * kPack;
  const int inside = way < c.ways ? int(min(c.columns - column, int64_t(kPack))) : 0;  // below 1: nothing
  const int64_t end = min(c.rows, (chunk + 1) * c.rows_per_chunk);
  const T* const from = c.x + group * c.group_stride + column;

  float sum[kPack] = {};
  for (int64_t row = chunk * c.rows_per_chunk + way; row < end; row += kAhead * c.ways) {
    if constexpr (kPack == 1) {
      T loaded[kAhead];
#pragma unroll
      for (int n = 0; n < kAhead; ++n)
        loaded[n] = inside > 0 && row + n * c.ways < end ? from[(row + n * c.ways) * c.row_stride] : T();
#pragma unroll
      for (int n = 0; n < kAhead; ++n) sum[0] += float(loaded[n]);
    } else {
      gpu::Words<T> loaded[kAhead];
#pragma unroll
      for (int n = 0; n < kAhead; ++n)
        if (inside == kPack && row + n * c.ways < end)
          loaded[n] = gpu::load_words(from + (row + n * c.ways) * c.row_stride);
      if (inside > 0 && inside < kPack)  // the last pack: what follows in memory is not ours
#pragma unroll
        for (int n = 0; n < kAhead; ++n)
          if (row + n * c.ways < end)
            loaded[n] = gpu::load_tail(from + (row + n * c.ways) * c.row_stride, inside);
#pragma unroll
      for (int n = 0; n < kAhead; ++n) {
        float values[kPack];
        gpu::unpack(values, loaded[n]);
#pragma unroll
        for (int i = 0; i < kPack; ++i) sum[i] += values[i];
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kPack; ++i) partial[threadIdx.x * kPack + i] = sum[i];
  __syncthreads();

  const int width = c.packs * kPack;
  for (int i = int(threadIdx.x); i < width && first + i < c.columns; i += int(blockDim.x)) {
    float total = partial[i];
    for (int w = 1; w < c.ways; ++w) total += partial[w * width + i];
    sums[(chunk * c.groups + group) * c.columns + first + i] = total;
  }
}

template <class T>
void sum_columns(Device device, float* sums, Columns<T> c) {
  constexpr int kPack = gpu::kPackOf<T>;
  const bool packed =
      c.columns >= kPack && gpu::is_pack_aligned(c.x, c.row_stride, kPack) && c.group_stride % kPack == 0;
  const int64_t packs = gpu::ceil_div(c.columns, packed ? kPack : 1);
  c.tiles = gpu::ceil_div(packs, kMostThreads);
  c.packs = int(gpu::ceil_div(packs, c.tiles));
  c.ways = kMostThreads / c.packs;
  const int64_t wanted = gpu::ceil_div(2 * int64_t(device.multiprocessors()), c.tiles * c.groups);
  const int64_t chunks = std::min(wanted, gpu::ceil_div(c.rows, 2 * kAhead * c.ways));
  c.rows_per_chunk = gpu::ceil_div(c.rows, chunks);
  c.chunks = gpu::ceil_div(c.rows, c.rows_per_chunk);
  check(c.tiles * c.groups * c.chunks < (int64_t(1) << 31), "column sums: ", c.groups, " groups of ",
        c.columns, " columns are too many for one grid");
  const int64_t width = c.groups * c.columns;
  const Tensor partial =
      c.chunks == 1 ? Tensor() : Tensor::empty_packed(Shape{c.chunks, width}, DType::f32, device);
  float* const to = c.chunks == 1 ? sums : partial.data<float>();
  const unsigned threads = unsigned(gpu::ceil_div(c.packs * c.ways, gpu::kWarp)) * gpu::kWarp;
  const gpu::LaunchShape shape{dim3(unsigned(c.tiles * c.groups * c.chunks)), dim3(threads)};
  if (packed) {
    gpu::launch(device, shape, column_sums_kernel<T, kPack>, c, to);
  } else {
    gpu::launch(device, shape, column_sums_kernel<T, 1>, c, to);
  }
  const gpu::PartialSums all{to, sums};
  if (c.chunks > 1) gpu::add_partial_sums(device, all, {}, c.chunks, width);
}

}  // namespace

void column_sums_cuda(const Tensor& sums, const Tensor& x) {
  dispatch_floating_cuda(x.dtype(), "column sums", [&]<class T>() {
    sum_columns<T>(
        x.device(), sums.data<float>(),
        {x.data<T>(), x.size(0), x.size(1), x.size(2), x.layout().stride(0), x.layout().stride(1)});
  });
}

}  // namespace tessera::ops
