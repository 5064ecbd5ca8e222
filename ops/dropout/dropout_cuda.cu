#include <algorithm>

#include "gpu/dependent_launch.cuh"
#include "gpu/pack.cuh"
#include "ops/dropout/dropout_mask.cuh"
#include "tensor/elementwise.h"

/// One read and one write an element, and its part of a Philox block (ops/dropout/dropout_mask.cuh): bound by
/// memory, and in 16 bits by both where x is in L2.
///
/// A thread makes one pack of 16 bytes. Dense tensors are one row: no divisions. A pack starts where a row
/// does, a Philox block where four elements of the row-major order do, so a pack of n may need n / 4 + 1
/// blocks; where rows are dense, the last is skipped.

namespace tessera::ops {
namespace {

constexpr int kThreads = 256;

/// kDense: one row, so that a pack's elements are whole Philox blocks.
template <class T, bool kDense>
__global__ void __launch_bounds__(kThreads)
    dropout_kernel(const StridedLoop<2> loop, T* y, const T* x, const DropoutDraw draw,
                   const int64_t packs_per_row, const int64_t packs, const bool aligned) {
  gpu::wait_and_launch_dependents();
  constexpr int kPack = gpu::kPackOf<T>;
  const uint64_t offset = draw.offset();
  const float scale = draw.scale;
  const int inner = loop.rank - 1;
  const int64_t width = loop.sizes[inner], y_stride = loop.strides[0][inner],
                x_stride = loop.strides[1][inner];
  for (int64_t pack = int64_t(blockIdx.x) * kThreads + threadIdx.x; pack < packs;
       pack += int64_t(gridDim.x) * kThreads) {
    int64_t row = kDense ? 0 : pack / packs_per_row;
    const int64_t first = (pack - row * packs_per_row) * kPack;
    const int64_t left = width - first;
    const int valid = left < kPack ? int(left) : kPack;
    const int64_t place = row * width + first;
    int64_t at = 0, from = 0;
    for (int dim = kDense ? -1 : inner - 1; dim >= 0; --dim) {
      const int64_t outer = row / loop.sizes[dim], index = row - outer * loop.sizes[dim];
      row = outer;
      at += index * loop.strides[0][dim], from += index * loop.strides[1][dim];
    }
    const bool whole = aligned && valid == kPack;
    gpu::Pack<T, kPack> values;
    if (whole) values = gpu::load_pack<kPack>(x + from + first);  // on its way while the numbers are drawn

    const uint32_t keep = draw.keep_bits<kPack, kDense>(offset, place);  // bit k: element k lives
    if (whole) {
#pragma unroll
      for (int k = 0; k < kPack; ++k) values.at[k] = T(float(values.at[k]) * (keep >> k & 1u ? scale : 0.0f));
      gpu::store_pack<kPack>(y + at + first, values);
    } else {
      for (int k = 0; k < valid; ++k)
        y[at + (first + k) * y_stride] =
            T(float(x[from + (first + k) * x_stride]) * (keep >> k & 1u ? scale : 0.0f));
    }
  }
}

}  // namespace

void dropout_cuda(const Tensor& y, const Tensor& x, const DropoutMask& mask) {
  const auto loop = make_loop(y.shape(), y, x);
  if (loop.count == 0) return;
  const Device device = y.device();
  dispatch_floating_cuda(x.dtype(), "dropout", [&]<class T>() {
    constexpr int kPack = gpu::kPackOf<T>;
    T* const out = y.data<T>();
    const T* const in = x.data<T>();
    const int inner = loop.rank - 1;
    bool aligned = gpu::is_pack_aligned(out, 0, kPack) && gpu::is_pack_aligned(in, 0, kPack);
    for (int n = 0; n < 2; ++n) {
      aligned = aligned && loop.strides[n][inner] == 1;
      for (int dim = 0; dim < inner; ++dim) aligned = aligned && loop.strides[n][dim] % kPack == 0;
    }
    const int64_t packs_per_row = gpu::ceil_div(loop.sizes[inner], kPack);
    const int64_t packs = loop.count / loop.sizes[inner] * packs_per_row;
    const int64_t blocks =
        std::min<int64_t>(gpu::ceil_div(packs, kThreads), int64_t(device.multiprocessors()) * 32);
    const auto launch = [&](auto kernel) {
      gpu::launch_dependent(device, {dim3(unsigned(blocks)), kThreads}, kernel, loop, out, in,
                            DropoutDraw(mask), packs_per_row, packs, aligned);
    };
    if (loop.rank == 1)
      launch(dropout_kernel<T, true>);
    else
      launch(dropout_kernel<T, false>);
  });
}

}  // namespace tessera::ops
