#include <algorithm>

#include "gpu/dependent_launch.cuh"
#include "gpu/divide.cuh"
#include "gpu/grid.cuh"
#include "gpu/pack.cuh"
#include "ops/gather/gather_kernels.h"
#include "ops/triangle/triangle_kernels.h"
#include "tensor/elementwise.h"

/// y is written, and x read only where it stays: half a read and a write, bound by memory. Rows that begin on
/// 16 bytes are made by packs, a thread each; of other layouts a thread makes an element.

namespace tessera::ops {
namespace {

constexpr int kThreads = 256;

template <class Word>
__global__ void __launch_bounds__(kThreads)
    triangle_kernel(const StridedLoop<2> loop, Word* y, const Word* x, int64_t rows, int64_t columns,
                    const Triangle triangle) {
  gpu::wait_and_launch_dependents();
  for (int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x; i < loop.count;
       i += int64_t(gridDim.x) * kThreads) {
    const int64_t row = i / columns, column = i - row * columns;
    int64_t rest = i, y_offset = 0, x_offset = 0;
    for (int dim = loop.rank - 1; dim > 0; --dim) {
      const int64_t outer = rest / loop.sizes[dim], index = rest - outer * loop.sizes[dim];
      y_offset += index * loop.strides[0][dim], x_offset += index * loop.strides[1][dim];
      rest = outer;
    }
    y_offset += rest * loop.strides[0][0], x_offset += rest * loop.strides[1][0];
    y[y_offset] = triangle.keeps(row % rows, column) ? x[x_offset] : Word(0);
  }
}

template <class Word>
struct Rows {
  Word* y;
  const Word* x;
  int64_t y_stride, x_stride, columns;
  uint32_t packs, packs_per_row;
  gpu::Divider by_packs_per_row, by_height;
};

template <class Word>
__global__ void __launch_bounds__(kThreads) triangle_rows(const Rows<Word> rows, const Triangle triangle) {
  constexpr int kPack = gpu::kPackOf<Word>;
  gpu::wait_and_launch_dependents();
  const uint32_t number = blockIdx.x * uint32_t(kThreads) + threadIdx.x;
  if (number >= rows.packs) return;
  const uint32_t row = rows.by_packs_per_row.divide(number),
                 within = row - rows.by_height.divide(row) * rows.by_height.divisor;
  const int64_t first = int64_t(number - row * rows.packs_per_row) * kPack, left = rows.columns - first;
  Word* const y = rows.y + row * rows.y_stride + first;
  const Word* const x = rows.x + row * rows.x_stride + first;
  if (left >= kPack) {
    gpu::Pack<Word, kPack> pack = {};
    if (triangle.keeps(within, triangle.lower ? first : first + kPack - 1)) {  // any of them
      pack = gpu::load_pack<kPack>(x);
#pragma unroll
      for (int k = 0; k < kPack; ++k)
        if (!triangle.keeps(within, first + k)) pack.at[k] = Word(0);
    }
    gpu::store_pack<kPack>(y, pack);
  } else {
    for (int k = 0; k < int(left); ++k) y[k] = triangle.keeps(within, first + k) ? x[k] : Word(0);
  }
}

/// Launches triangle_rows, or returns false where it does not take the operands.
template <class Word>
bool in_rows(const Tensor& y, const Tensor& x, const Triangle& triangle) {
  constexpr int kPack = gpu::kPackOf<Word>;
  if (!y.has_rows() || !x.has_rows()) return false;
  Rows<Word> rows{.y = static_cast<Word*>(y.raw()),
                  .x = static_cast<const Word*>(x.raw()),
                  .y_stride = y.row_stride(),
                  .x_stride = x.row_stride(),
                  .columns = x.size(-1)};
  const int64_t packs_per_row = gpu::ceil_div(rows.columns, kPack), packs = y.rows() * packs_per_row;
  if (!gpu::is_pack_aligned(rows.y, rows.y_stride, kPack) ||
      !gpu::is_pack_aligned(rows.x, rows.x_stride, kPack) || packs > (int64_t(1) << 31) - kThreads)
    return false;
  rows.packs = uint32_t(packs), rows.packs_per_row = uint32_t(packs_per_row);
  rows.by_packs_per_row = gpu::Divider(rows.packs_per_row);
  rows.by_height = gpu::Divider(uint32_t(x.size(-2)));
  gpu::launch_dependent(y.device(), {gpu::grid_of(gpu::ceil_div(packs, kThreads)), kThreads},
                        triangle_rows<Word>, rows, triangle);
  return true;
}

}  // namespace

void triangle_cuda(const Tensor& y, const Tensor& x, const Triangle& triangle) {
  const Device device = y.device();
  const int64_t blocks =
      std::min<int64_t>(gpu::ceil_div(y.count(), kThreads), int64_t(device.multiprocessors()) * 32);
  dispatch_size(y.dtype(), [&]<class Word>() {
    if (in_rows<Word>(y, x, triangle)) return;
    gpu::launch_dependent(device, {gpu::grid_of(blocks), kThreads}, triangle_kernel<Word>,
                          make_loop(y.shape(), y, x), static_cast<Word*>(y.raw()),
                          static_cast<const Word*>(x.raw()), x.size(-2), x.size(-1), triangle);
  });
}

}  // namespace tessera::ops
