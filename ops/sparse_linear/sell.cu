#include "ops/sparse_linear/sell.cuh"

namespace tessera::ops {
namespace {

using namespace sparse;

template <class T, class Shape>
void launch(Device device, SellArgs<T> args, int windows, int cluster) {
  args.blocks = std::clamp(args.x.parts, 1, cluster);
  gpu::launch(device,
              {.grid = dim3(unsigned(windows * args.blocks)),
               .block = unsigned(Shape::kThreads),
               .shared_bytes = Shape::shared_bytes(args.x.width),
               .cluster = args.blocks,
               .overlaps = true},
              multiply_slices<T, Shape>, args);
}

}  // namespace

void sparse_sell_cuda(const SparsePartCall& call) {
  const Device device = call.x.device();
  const SparseWeight& weight = call.weight;
  const Tensor x = dense_rows(call.x), residual = dense_rows(call.residual);
  const auto words = [](const Tensor& array) { return static_cast<const uint32_t*>(array.raw()); };
  dispatch_floating_cuda(x.dtype(), "sparse_linear", [&]<class T>() {
    if constexpr (sizeof(T) == 2) {
      Tensor bits;
      const SellArgs<T> args{.to = output_of<T>(call, residual),
                             .x = inputs_of<T>(x, weight),
                             .values = static_cast<const uint4*>(weight.values.raw()),
                             .gaps = words(weight.gaps),
                             .rows = words(weight.info),
                             .offsets = weight.offsets.template data<int32_t>(),
                             .gate = device_gate(call.gate, x, bits),
                             .blocks = 1};
      const int windows = int(weight.group_rows());
      // Few blocks need more bytes on the way each (docs/ops/sparse_linear.md).
      const bool few = windows * 8 <= 2 * Gpu(device).multiprocessors;
      if (args.x.tokens == 1 && few)
        launch<T, SellShape<1, 1, 8, 2>>(device, args, windows, 8);
      else if (args.x.tokens == 1)
        launch<T, SellShape<1, 1, 4, 4>>(device, args, windows, 8);
      else if (args.x.tokens == 2 && few)
        launch<T, SellShape<2, 2, 8, 1>>(device, args, windows, 4);
      else if (args.x.tokens == 2)
        launch<T, SellShape<2, 2, 4, 2>>(device, args, windows, 4);
      else if (args.x.tokens <= 4 && few)
        launch<T, SellShape<4, 2, 4, 1>>(device, args, windows, 4);
      else if (args.x.tokens <= 4)
        launch<T, SellShape<4, 1, 4, 3>>(device, args, windows, 8);
      else
        launch<T, SellShape<8, 1, 4, 3>>(device, args, windows, 8);
    }
  });
}

}  // namespace tessera::ops
