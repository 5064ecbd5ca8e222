#include "gpu/row.cuh"
#include "ops/embedding/embedding_kernels.h"
#include "ops/indices.h"

/// Forward copies rows, 16 bytes per thread: one read and one write per element, bound by memory. Backward:
/// embedding_backward_cuda.cu.

namespace tessera::ops {
namespace {

using gpu::ceil_div;
using gpu::kPackOf;
using gpu::load_row;
using gpu::store_row;

constexpr int kBlock = 256;

template <class T>
struct ForwardArgs {
  T* y;
  const T* table;
  Indices indices;
  int64_t y_stride, stride, count, rows, width, packs_per_row;
  EmbeddingPart part;
  bool whole;
};

template <class T>
__global__ void __launch_bounds__(kBlock) forward(ForwardArgs<T> args) {
  constexpr int kPack = kPackOf<T>;
  for (int64_t at = blockIdx.x * int64_t(kBlock) + threadIdx.x; at < args.count * args.packs_per_row;
       at += int64_t(gridDim.x) * kBlock) {
    const int64_t i = at / args.packs_per_row, first = (at - i * args.packs_per_row) * kPack;
    const int64_t index = args.indices[i], row = index - args.part.first;
    const bool valid = 0 <= index && index < args.part.rows;
    float values[kPack];
    if (valid && 0 <= row && row < args.rows) {
      load_row(values, args.table + row * args.stride, first, args.width, args.whole, 0.0f);
    } else {
#pragma unroll
      for (int k = 0; k < kPack; ++k) values[k] = valid ? 0.0f : __int_as_float(0x7FC00000);
    }
    store_row(args.y + i * args.y_stride, first, args.width, args.whole, values);
  }
}

}  // namespace

void embedding_forward_cuda(const Tensor& y, const Tensor& table, const Tensor& indices, EmbeddingPart part) {
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
                              part,
                              gpu::is_pack_aligned(y.data<T>(), y.row_stride(), kPack) &&
                                  gpu::is_pack_aligned(table.data<T>(), table.row_stride(), kPack)};
    const int64_t blocks = std::min<int64_t>(ceil_div(args.count * packs_per_row, kBlock),
                                             int64_t(device.multiprocessors()) * 32);
    gpu::launch(device, {dim3(unsigned(blocks)), kBlock}, forward<T>, args);
  });
}

}  // namespace tessera::ops
