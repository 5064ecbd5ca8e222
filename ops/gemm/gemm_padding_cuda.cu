#include <algorithm>
#include <cstdint>

#include "gpu/launch.cuh"
#include "gpu/pack.cuh"
#include "ops/gemm/gemm_padding.h"
#include "tensor/elementwise.h"

/// Copies of matrices with zero padding, in one kernel: one read and one write per element, bound by memory,
/// or by the launch for the weights it is mostly used for.
///
/// A thread makes one pack of one row of y (16 bytes where y's rows are pitched), padding included, so that
/// neighbouring threads write neighbouring words. It reads words where x's rows are dense and aligned and the
/// pack lies inside, else element by element. Bits are copied unchanged, so both 16-bit dtypes share a
/// kernel. Word: uint16_t or uint32_t.

namespace tessera::ops {
namespace {

template <class Word>
struct PaddedCopy {
  StridedLoop<1> matrices;  // over x's leading dimensions; y's matrices are dense
  const Word* x;
  Word* y;
  int64_t rows, columns, row_stride, column_stride;  // of x
  int64_t y_rows, packs_per_row;
  int64_t packs;
  bool words;  // x may be read in packs
};

template <class Word, int kPack>
__global__ void __launch_bounds__(256) padded_copy_kernel(PaddedCopy<Word> c) {
  for (int64_t pack = blockIdx.x * int64_t(blockDim.x) + threadIdx.x; pack < c.packs;
       pack += int64_t(gridDim.x) * blockDim.x) {
    const int64_t row_of_all = pack / c.packs_per_row;
    const int64_t column = (pack - row_of_all * c.packs_per_row) * kPack;
    int64_t matrix = row_of_all / c.y_rows;
    const int64_t row = row_of_all - matrix * c.y_rows;
    gpu::Pack<Word, kPack> values{};
    if (row < c.rows && column < c.columns) {
      const Word* from = c.x + row * c.row_stride + column * c.column_stride;
      for (int dim = c.matrices.rank - 1; dim >= 0; --dim) {
        const int64_t outer = matrix / c.matrices.sizes[dim];
        from += (matrix - outer * c.matrices.sizes[dim]) * c.matrices.strides[0][dim];
        matrix = outer;
      }
      if (c.words && column + kPack <= c.columns) {
        values = gpu::load_pack<kPack>(from);
      } else {
#pragma unroll
        for (int i = 0; i < kPack; ++i)
          if (column + i < c.columns) values.at[i] = from[i * c.column_stride];
      }
    }
    gpu::store_pack<kPack>(c.y + pack * kPack, values);
  }
}

template <class Word, int kPack>
void launch_copy(Device device, PaddedCopy<Word> c) {
  const int64_t blocks =
      std::min<int64_t>(gpu::ceil_div(c.packs, 256), int64_t(device.multiprocessors()) * 32);
  gpu::launch(device, {dim3(unsigned(blocks)), 256}, padded_copy_kernel<Word, kPack>, c);
}

template <class Word>
void padded_copy(const Tensor& y, const Tensor& x) {
  constexpr int kPack = gpu::kPackOf<Word>;
  const int64_t pitch = row_pitch(y.size(-1), y.dtype());
  const Layout& of_x = x.layout();
  Layout matrices = of_x;
  matrices.shape = of_x.shape.without(-1).without(-1);
  PaddedCopy<Word> c{.matrices = make_loop<1>(matrices.shape, {&matrices}),
                     .x = static_cast<const Word*>(x.raw()),
                     .y = static_cast<Word*>(y.raw()),
                     .rows = x.size(-2),
                     .columns = x.size(-1),
                     .row_stride = of_x.stride(-2),
                     .column_stride = of_x.stride(-1),
                     .y_rows = y.size(-2)};
  c.words = (c.column_stride == 1 || c.columns == 1) && gpu::is_pack_aligned(c.x, c.row_stride, kPack);
  for (int dim = 0; dim < c.matrices.rank; ++dim)
    c.words = c.words && c.matrices.strides[0][dim] % kPack == 0;
  const bool packed = pitch % kPack == 0;
  c.packs_per_row = packed ? pitch / kPack : pitch;
  c.packs = c.matrices.count * c.y_rows * c.packs_per_row;
  if (packed) {
    launch_copy<Word, kPack>(y.device(), c);
  } else {
    launch_copy<Word, 1>(y.device(), c);
  }
}

}  // namespace

void padded_copy_cuda(const Tensor& y, const Tensor& x) {
  if (size_of(x.dtype()) == 2)
    padded_copy<uint16_t>(y, x);
  else
    padded_copy<uint32_t>(y, x);
}

}  // namespace tessera::ops
