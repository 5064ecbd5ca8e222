#include "ops/sparse_linear/bitmap.cuh"

namespace tessera::ops {
namespace {

using namespace sparse;

/// Shared memory of a block's stages: with four blocks or more on an SM, some 150 KB are in flight.
constexpr int kStageMemory = 40 * 1024;
/// Groups of which a block has 4 or more.
constexpr int64_t kLeastGroups = 4;

template <class T, int kTiles>
void launch(Device device, const BitmapArgs<T>& args, int64_t group_rows) {
  const size_t bytes = size_t(args.stages) * size_t(args.stage_bytes) + sizeof(BitmapShared<kTiles>);
  gpu::launch(device,
              {.grid = dim3(unsigned(group_rows * args.blocks)),
               .block = kBitmapThreads,
               .shared_bytes = bytes,
               .cluster = args.blocks,
               .overlaps = true},
              multiply_bitmaps<T, kTiles>, args);
}

}  // namespace

void sparse_bitmap_cuda(const SparsePartCall& call) {
  const Device device = call.x.device();
  const SparseWeight& weight = call.weight;
  dispatch_floating_cuda(call.x.dtype(), "sparse_linear", [&]<class T>() {
    if constexpr (sizeof(T) == 2) {
      Tensor bits;
      const Tensor x = gpu::pack_aligned_or_copy<T>(dense_rows(call.x)), residual = dense_rows(call.residual);
      BitmapArgs<T> args{.to = output_of<T>(call, residual),
                         .x = x.template data<T>(),
                         .values = weight.values.template data<T>(),
                         .bitmaps = weight.bitmaps.template data<int64_t>(),
                         .offsets = weight.offsets.template data<int32_t>(),
                         .info = weight.info.template data<int32_t>(),
                         .x_stride = x.layout().stride(0),
                         .gate = device_gate(call.gate, x, bits),
                         .tokens = int(x.size(0)),
                         .in = int(weight.in),
                         .group_columns = int(weight.group_columns())};
      args.blocks = cluster_blocks(weight.group_rows(), args.group_columns, kLeastGroups, 4, device);
      args.range = int(gpu::ceil_div(args.group_columns, args.blocks));
      args.bitmaps_at = int(weight.most) * int(sizeof(T));
      args.stage_bytes = int(gpu::ceil_div(args.bitmaps_at + kBitmapBytes + kInfoBytes, 128)) * 128;
      args.stages = std::max(2, std::min(kBitmapStages, kStageMemory / args.stage_bytes));
      if (args.tokens <= 8)
        launch<T, 1>(device, args, weight.group_rows());
      else if (args.tokens <= 16)
        launch<T, 2>(device, args, weight.group_rows());
      else
        launch<T, 4>(device, args, weight.group_rows());
    }
  });
}

}  // namespace tessera::ops
