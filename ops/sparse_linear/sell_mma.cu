#include "ops/sparse_linear/sell_mma.cuh"

namespace tessera::ops {
namespace {

using namespace sparse;

template <class T, int kTokens>
void launch(Device device, const SellMmaPlan& plan, const mma::Args<T>& args) {
  gpu::launch(device,
              {.grid = dim3(unsigned(plan.teams * plan.blocks)),
               .block = mma::kThreads,
               .shared_bytes = sizeof(mma::Memory<kTokens>),
               .overlaps = true},
              multiply_slices_mma<T, kTokens>, args);
  gpu::launch_dependent(
      device, {.grid = dim3(unsigned(args.units), unsigned(kTokens / 8)), .block = unsigned(kWindow)},
      add_teams<T>, args, kTokens);
}

void multiply(std::span<const SparsePartCall> parts) {
  const Device device = parts[0].x.device();
  const Tensor x = dense_rows(parts[0].x);
  const SellMmaPlan plan =
      plan_sell_mma(tiles_of(parts, false), parts[0].weight.in, x.size(0), Gpu(device).multiprocessors);
  check(!*plan.lacks, "sparse_linear: variant sell_mma needs ", plan.lacks);
  if (ChoiceLog* const log = ChoiceLog::current()) log->add(text_of("sell_mma: ", describe(plan)));
  dispatch_floating_cuda(x.dtype(), "sparse_linear", [&]<class T>() {
    if constexpr (sizeof(T) == 2) {
      std::vector<Tensor> kept;  // until the launch is issued
      const Tensor partial = Tensor::empty_packed(
          {int64_t(plan.windows) * plan.token_tiles, plan.blocks, kWindow, plan.tokens}, DType::f32, device);
      mma::Args<T> args{.weights = {},
                        .x = inputs_of<T>(x, parts[0].weight),
                        .count = int(parts.size()),
                        .units = plan.windows * plan.token_tiles,
                        .token_tiles = plan.token_tiles,
                        .blocks = plan.blocks,
                        .teams = plan.teams,
                        .partial = partial.data<float>(),
                        .constant = true,
                        .has_packs = reinterpret_cast<uintptr_t>(x.raw()) % 16 == 0 &&
                                     (x.size(0) == 1 || x.layout().stride(0) % 8 == 0)};
      int tiles = 0;
      for (size_t i = 0; i < parts.size(); ++i) {
        args.weights[i] = sell_weight_of<T>(parts[i], x, tiles, kept);
        args.constant &= parts[i].weight.constant;
        args.has_gates |= parts[i].gate.kind != Gate::Kind::none;
        tiles += int(parts[i].weight.group_rows());
      }
      if (plan.tokens == 8)
        launch<T, 8>(device, plan, args);
      else if (plan.tokens == 16)
        launch<T, 16>(device, plan, args);
      else
        launch<T, 32>(device, plan, args);
    }
  });
}

}  // namespace

void sparse_sell_mma_cuda(const SparseCall& call) {
  for_each_launch(call, [](std::span<const SparsePartCall> parts) { multiply(parts); });
}

}  // namespace tessera::ops
