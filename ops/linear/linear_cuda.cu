#include <algorithm>
#include <limits>

#include "gpu/launch.cuh"
#include "gpu/pack.cuh"
#include "ops/linear/linear_kernels.h"

/// Column sums, for the gradients of biases: one read an element, bound by memory.
///
/// A block takes a chunk of rows and 32 packs of columns (a pack is 16 bytes where the rows are aligned for
/// it, else one element). Its eight warps take every eighth row each, a lane a pack; the eight sums of a
/// column are added in order through shared memory. Chunks are as many as fill the GPU, and their sums are
/// rows of a second, small launch of the same kernel. No atomics: the order depends only on the shape and the
/// card.

namespace tessera::ops {
namespace {

constexpr int kWarps = 8;
constexpr int kAhead = 4;  // rows whose loads a thread has under way together

/// x [rows, groups, columns] as the kernel sees it.
template <class T>
struct Columns {
  const T* x;
  int64_t rows, groups, columns, row_stride, group_stride;
  int64_t tiles;                   // blocks along the columns
  int64_t chunks, rows_per_chunk;  // blocks along the rows
};

/// sums[chunk][group][column]; one block for each (chunk, group, tile), the tile fastest
template <class T, int kPack>
__global__ void __launch_bounds__(gpu::kWarp* kWarps) column_sums_kernel(Columns<T> c, float* sums) {
  __shared__ float partial[kWarps][gpu::kWarp * kPack];
  const int lane = int(threadIdx.x) % gpu::kWarp, warp = int(threadIdx.x) / gpu::kWarp;
  const int64_t tile = blockIdx.x % c.tiles, group = blockIdx.x / c.tiles % c.groups,
                chunk = blockIdx.x / c.tiles / c.groups;
  const int64_t first = tile * (gpu::kWarp * kPack), column = first + lane * kPack;
  const int64_t end = min(c.rows, (chunk + 1) * c.rows_per_chunk);
  const T* const from = c.x + group * c.group_stride + column;

  float sum[kPack] = {};
  const int inside = int(min(c.columns - column, int64_t(kPack)));  // of a pack; below 1: nothing
  for (int64_t row = chunk * c.rows_per_chunk + warp; row < end; row += kAhead * kWarps) {
    if constexpr (kPack == 1) {
      T values[kAhead];
#pragma unroll
      for (int n = 0; n < kAhead; ++n) {
        const int64_t r = row + n * kWarps;
        values[n] = inside == 1 && r < end ? from[r * c.row_stride] : T();
      }
#pragma unroll
      for (int n = 0; n < kAhead; ++n) sum[0] += float(values[n]);
    } else {
      gpu::Words<T> words[kAhead];
#pragma unroll
      for (int n = 0; n < kAhead; ++n) {
        const int64_t r = row + n * kWarps;
        if (inside == kPack && r < end) words[n] = gpu::load_words(from + r * c.row_stride);
      }
      if (inside > 0 && inside < kPack)  // the last pack: what follows in memory is not ours
#pragma unroll
        for (int n = 0; n < kAhead; ++n) {
          const int64_t r = row + n * kWarps;
          if (r < end) words[n] = gpu::load_part(from + r * c.row_stride, inside);
        }
#pragma unroll
      for (int n = 0; n < kAhead; ++n) {
        float values[kPack];
        gpu::unpack(values, words[n]);
#pragma unroll
        for (int i = 0; i < kPack; ++i) sum[i] += values[i];
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kPack; ++i) partial[warp][lane * kPack + i] = sum[i];
  __syncthreads();

  for (int i = int(threadIdx.x); i < gpu::kWarp * kPack; i += gpu::kWarp * kWarps) {
    if (first + i >= c.columns) break;
    float total = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) total += partial[w][i];
    sums[(chunk * c.groups + group) * c.columns + first + i] = total;
  }
}

template <class T>
void sum_columns(Device device, float* sums, Columns<T> c, int64_t most_chunks) {
  constexpr int kPack = gpu::kPackOf<T>;
  const bool packed =
      c.columns >= kPack && gpu::packs(c.x, c.row_stride, kPack) && c.group_stride % kPack == 0;
  c.tiles = gpu::ceil_div(c.columns, gpu::kWarp * (packed ? kPack : 1));
  // Four blocks a multiprocessor, and at least eight rows a warp.
  const int64_t wanted = gpu::ceil_div(4 * int64_t(device.card().multiprocessors), c.tiles * c.groups);
  const int64_t chunks = std::min({wanted, gpu::ceil_div(c.rows, 8 * kWarps), most_chunks});
  c.rows_per_chunk = gpu::ceil_div(c.rows, chunks);
  c.chunks = gpu::ceil_div(c.rows, c.rows_per_chunk);
  check(c.tiles * c.groups * c.chunks < (int64_t(1) << 31), "column sums: ", c.groups, " groups of ",
        c.columns, " columns are too many for one grid");
  const Tensor partial =
      c.chunks == 1 ? Tensor()
                    : Tensor::empty_packed(Shape{c.chunks, c.groups * c.columns}, DType::f32, device);
  float* const to = c.chunks == 1 ? sums : partial.data<float>();
  const gpu::LaunchShape shape{dim3(unsigned(c.tiles * c.groups * c.chunks)), dim3(gpu::kWarp * kWarps)};
  if (packed) {
    gpu::launch(device, shape, column_sums_kernel<T, kPack>, c, to);
  } else {
    gpu::launch(device, shape, column_sums_kernel<T, 1>, c, to);
  }
  if (c.chunks == 1) return;
  const int64_t width = c.groups * c.columns;
  sum_columns<float>(device, sums, {partial.data<float>(), c.chunks, 1, width, width, width}, 1);
}

}  // namespace

void column_sums_cuda(const Tensor& sums, const Tensor& x) {
  dispatch_floating_cuda(x.dtype(), "column sums", [&]<class T>() {
    sum_columns<T>(x.device(), sums.data<float>(),
                   {x.data<T>(), x.size(0), x.size(1), x.size(2), x.layout().stride(0), x.layout().stride(1)},
                   std::numeric_limits<int64_t>::max());
  });
}

}  // namespace tessera::ops
