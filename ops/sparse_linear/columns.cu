#include "ops/sparse_linear/columns.cuh"

namespace tessera::ops {
namespace {

using namespace sparse;

/// Inputs of which a block has 128 or more: fewer are not worth the sum over the cluster.
constexpr int64_t kLeastRange = 128;

template <class T>
ColumnArgs<T> args_of(const SparsePartCall& call, const Tensor& x, const Tensor& residual, Tensor& bits,
                      int tiles) {
  ColumnArgs<T> args{
      .to = output_of<T>(call, residual),
      .x = {.x = x.data<T>(), .stride = x.layout().stride(0), .tokens = int(x.size(0)), .in = int(x.size(1))},
      .gate = device_gate(call.gate, x, bits)};
  args.blocks = cluster_blocks(tiles, x.size(1), kLeastRange, 4, x.device());
  args.range = int(gpu::ceil_div(gpu::ceil_div(x.size(1), args.blocks), kWarp)) * kWarp;
  return args;
}

template <class T>
void launch(Device device, const ColumnArgs<T>& args, int tiles, void (*kernel)(ColumnArgs<T>)) {
  gpu::launch(device,
              {.grid = dim3(unsigned(tiles * args.blocks)),
               .block = kColumnThreads,
               .cluster = args.blocks,
               .overlaps = true},
              kernel, args);
}

}  // namespace

void sparse_columns_cuda(const SparsePartCall& call) {
  const Device device = call.x.device();
  const Tensor x = dense_rows(call.x), residual = dense_rows(call.residual);
  const int tiles = int(gpu::ceil_div(call.weight.out, kTileOutputs));
  dispatch_floating_cuda(x.dtype(), "sparse_linear", [&]<class T>() {
    if constexpr (sizeof(T) == 2) {
      Tensor bits;
      const Tensor values = gpu::pack_aligned_or_copy<T>(call.weight.values);
      ColumnArgs<T> args = args_of<T>(call, x, residual, bits, tiles);
      args.values = values.template data<T>();
      args.column_stride = values.layout().stride(0);
      if (args.x.tokens == 1)
        launch(device, args, tiles, multiply_columns<T, 1, 8, 3>);
      else if (args.x.tokens == 2)
        launch(device, args, tiles, multiply_columns<T, 2, 8, 2>);
      else if (args.x.tokens <= 4)
        launch(device, args, tiles, multiply_columns<T, 4, 8, 2>);
      else
        launch(device, args, tiles, multiply_columns<T, 8, 8, 1>);
    }
  });
}

void sparse_tiles_cuda(const SparsePartCall& call) {
  const Device device = call.x.device();
  const Tensor x = dense_rows(call.x), residual = dense_rows(call.residual);
  const int tiles = int(call.weight.group_rows());
  dispatch_floating_cuda(x.dtype(), "sparse_linear", [&]<class T>() {
    if constexpr (sizeof(T) == 2) {
      Tensor bits;
      ColumnArgs<T> args = args_of<T>(call, x, residual, bits, tiles);
      args.values = call.weight.values.template data<T>();
      args.bitmaps = reinterpret_cast<const uint32_t*>(call.weight.bitmaps.template data<int64_t>());
      args.info = reinterpret_cast<const uint32_t*>(call.weight.info.template data<int32_t>());
      args.offsets = call.weight.offsets.template data<int32_t>();
      args.group_columns = int(call.weight.group_columns());
      if (args.x.tokens == 1)
        launch(device, args, tiles, multiply_tiles<T, 1, 4, 3>);
      else if (args.x.tokens <= 4)
        launch(device, args, tiles, multiply_tiles<T, 4, 4, 2>);
      else
        launch(device, args, tiles, multiply_tiles<T, 8, 2, 1>);
    }
  });
}

}  // namespace tessera::ops
