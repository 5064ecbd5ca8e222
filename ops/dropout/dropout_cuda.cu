#include <algorithm>

#include "gpu/dependent_launch.cuh"
#include "gpu/divide.cuh"
#include "gpu/grid.cuh"
#include "gpu/pack.cuh"
#include "ops/dropout/dropout_mask.cuh"
#include "ops/reduce/reduce_plan.h"
#include "tensor/elementwise.h"

/// One read and one write per element, and its share of a Philox block (ops/dropout/dropout_mask.cuh): bound
/// by memory, and in 16 bits by instructions where x is in L2.
///
///   aligned_rows  Rows that begin on packs of 16 bytes: the usual case; dense tensors are one row. A pack
///                 starts where a row does, a Philox block where four elements of the row-major order do, so
///                 in rows of odd length a pack takes bits of a third block, the first one of the next pack.
///                 A lane draws the two blocks that its pack begins with and takes the third one's bits from
///                 the next lane, so a warp draws one block more than its packs have.
///   any_layout    the rest: a thread per Philox block, whose four elements it looks up one by one.

namespace tessera::ops {
namespace {

constexpr int kThreads = 256, kPacks = 2;  // packs per thread

struct Rows {
  int64_t width, y_stride, x_stride;
  uint32_t packs, packs_per_row;
  gpu::Divider by_packs_per_row;
};

template <class T>
__global__ void __launch_bounds__(kThreads)
    aligned_rows(const __grid_constant__ Rows rows, T* y, const T* x, const DropoutDraw draw) {
  constexpr int kPack = gpu::kPackOf<T>, kWarp = gpu::kWarp;
  gpu::wait_and_launch_dependents();
  const uint32_t lane = threadIdx.x % kWarp;
  const uint32_t first = (blockIdx.x * blockDim.x + threadIdx.x - lane) * kPacks;  // pack of the warp
  const uint32_t last_length = uint32_t(rows.width - int64_t(rows.packs_per_row - 1) * kPack);
  const auto row_of = [&](uint32_t pack) { return rows.by_packs_per_row.divide(pack); };
  const auto column_of = [&](uint32_t pack, uint32_t row) {
    return int64_t(pack - row * rows.packs_per_row) * kPack;
  };
  gpu::Words<T> words[kPacks];
  int64_t to[kPacks];       // where the pack lies in y
  uint64_t index[kPacks];   // of its first element, row-major
  uint32_t length[kPacks];  // elements that are inside the row
#pragma unroll
  for (int n = 0; n < kPacks; ++n) {
    const uint32_t pack = first + n * kWarp + lane, row = row_of(pack);
    const int64_t column = column_of(pack, row);
    to[n] = row * rows.y_stride + column;
    index[n] = uint64_t(row * rows.width + column);
    length[n] = pack >= rows.packs                           ? 0
                : pack + 1 == (row + 1) * rows.packs_per_row ? last_length
                                                             : uint32_t(kPack);
    if (length[n] > 0) words[n] = gpu::load_words(x + row * rows.x_stride + column);
  }
  const uint64_t offset = draw.offset();
  uint32_t bits[kPacks + 1];  // of the blocks that the packs begin with, and of the next warp's first
#pragma unroll
  for (int n = 0; n < kPacks; ++n) bits[n] = draw.blocks<kPack / 4>(offset, index[n] / 4);
  bits[kPacks] = 0;
  if (rows.width % 4 != 0) {
    const uint32_t next = first + kPacks * kWarp, row = row_of(next);
    bits[kPacks] = draw.blocks<1>(offset, uint64_t(row * rows.width + column_of(next, row)) / 4);
  }
#pragma unroll
  for (int n = 0; n < kPacks; ++n) {
    const uint32_t next = __shfl_sync(0xFFFFFFFFu, lane == 0 ? bits[n + 1] : bits[n], int(lane + 1) % kWarp);
    const uint32_t keep = (bits[n] | next << kPack) >> index[n] % 4;  // bit k: element k lives
    float values[kPack];
    gpu::unpack(values, words[n]);
#pragma unroll
    for (int k = 0; k < kPack; ++k) values[k] *= keep >> k & 1u ? draw.scale : 0.0f;
    const gpu::Words<T> results = gpu::round_to_words<T>(values);
    if (length[n] == kPack)
      gpu::store_words(y + to[n], results);
    else
      gpu::store_part(y + to[n], results, int(length[n]));
  }
}

/// loop: y, x.
template <class T>
__global__ void __launch_bounds__(kThreads)
    any_layout(const StridedLoop<2> loop, T* y, const T* x, const DropoutDraw draw) {
  gpu::wait_and_launch_dependents();
  const uint64_t offset = draw.offset();
  for (int64_t block = int64_t(blockIdx.x) * kThreads + threadIdx.x; 4 * block < loop.count;
       block += int64_t(gridDim.x) * kThreads) {
    const uint32_t keep = draw.blocks<1>(offset, uint64_t(block));
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      int64_t index = 4 * block + k, to = 0, from = 0;
      if (index >= loop.count) continue;
      for (int dim = loop.rank - 1; dim >= 0; --dim) {
        const int64_t outer = ReducePlan::quotient(index, loop.sizes[dim]),
                      at = index - outer * loop.sizes[dim];
        to += at * loop.strides[0][dim], from += at * loop.strides[1][dim];
        index = outer;
      }
      y[to] = T(float(x[from]) * (keep >> k & 1u ? draw.scale : 0.0f));
    }
  }
}

}  // namespace

void dropout_cuda(const Tensor& y, const Tensor& x, const DropoutMask& mask) {
  const auto loop = make_loop(y.shape(), y, x);
  if (loop.count == 0) return;
  const Device device = y.device();
  const int64_t multiprocessors = device.multiprocessors();
  const DropoutDraw draw(mask);
  dispatch_floating_cuda(x.dtype(), "dropout", [&]<class T>() {
    constexpr int kPack = gpu::kPackOf<T>;
    T* const out = y.data<T>();
    const T* const in = x.data<T>();
    const int inner = loop.rank - 1;
    const int64_t width = loop.sizes[inner], packs_per_row = gpu::ceil_div(width, kPack),
                  packs = loop.count / width * packs_per_row;
    const auto stride = [&](int n) { return inner == 0 ? 0 : loop.strides[n][0]; };
    if (inner <= 1 && loop.strides[0][inner] == 1 && loop.strides[1][inner] == 1 &&
        gpu::is_pack_aligned(out, stride(0), kPack) && gpu::is_pack_aligned(in, stride(1), kPack) &&
        packs < (int64_t(1) << 31) - 2 * kThreads * kPacks) {
      const Rows rows{.width = width,
                      .y_stride = stride(0),
                      .x_stride = stride(1),
                      .packs = uint32_t(packs),
                      .packs_per_row = uint32_t(packs_per_row),
                      .by_packs_per_row = gpu::Divider(uint32_t(packs_per_row))};
      // Small tensors are spread over all SMs.
      const int64_t threads = gpu::ceil_div(packs, kPacks),
                    block = threads >= multiprocessors * 1024 ? kThreads : 64;
      gpu::launch_dependent(device, {gpu::grid_of(gpu::ceil_div(threads, block)), unsigned(block)},
                            aligned_rows<T>, rows, out, in, draw);
    } else {
      const int64_t blocks =
          std::min<int64_t>(gpu::ceil_div(gpu::ceil_div(loop.count, 4), kThreads), multiprocessors * 32);
      gpu::launch_dependent(device, {gpu::grid_of(blocks), kThreads}, any_layout<T>, loop, out, in, draw);
    }
  });
}

}  // namespace tessera::ops
