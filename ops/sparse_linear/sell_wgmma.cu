#include "ops/sparse_linear/sell_wgmma.cuh"
#include "ops/sparse_linear/sell_wgmma_ends.cuh"

namespace tessera::ops {
namespace {

using namespace sparse;

template <class T, int kTokens>
void launch(Device device, const tiles::Args<T>& args, bool swiglu) {
  const SellWgmmaPlan& plan = args.plan;
  gpu::launch_dependent(device,
                        {.grid = dim3(unsigned(gpu::ceil_div(plan.apart * plan.tokens, kPackThreads)),
                                      unsigned(plan.token_tiles * plan.parts * plan.passes),
                                      unsigned(args.has_gates ? args.count : 1)),
                         .block = unsigned(kPackThreads)},
                        pack_inputs<T>, args);
  gpu::launch(device,
              {.grid = dim3(unsigned(plan.blocks * plan.token_tiles)),
               .block = unsigned(tiles::kThreads),
               .shared_bytes = sizeof(tiles::Memory<kTokens>),
               .overlaps = true},
              multiply_tiles<T, kTokens>, args);
  const int at_once = std::min(32, plan.tokens), windows = swiglu ? plan.windows / 2 : plan.windows;
  const gpu::LaunchShape sums{
      .grid = dim3(unsigned(windows * (kWindow / kSumRows)), unsigned(gpu::ceil_div(args.x.tokens, at_once))),
      .block = unsigned(kSumThreads)};
  if (swiglu)
    gpu::launch_dependent(device, sums, add_splits<T, true>, args, at_once);
  else
    gpu::launch_dependent(device, sums, add_splits<T, false>, args, at_once);
}

/// Up to kJointWeights weights; with swiglu gate and up, whose y is one.
void multiply(std::span<const SparsePartCall> parts, bool swiglu) {
  const Device device = parts[0].x.device();
  const Tensor x = dense_rows(parts[0].x);
  const SellWgmmaPlan plan =
      plan_sell_wgmma(tiles_of(parts, false), parts[0].weight.in, x.size(0), Gpu(device).multiprocessors);
  check(!*plan.lacks, "sparse_linear: variant sell_wgmma needs ", plan.lacks);
  if (ChoiceLog* const log = ChoiceLog::current()) log->add(text_of("sell_wgmma: ", describe(plan)));
  dispatch_floating_cuda(x.dtype(), "sparse_linear", [&]<class T>() {
    if constexpr (sizeof(T) == 2) {
      std::vector<Tensor> kept;  // until the launch is issued
      tiles::Args<T> args{};
      args.x = inputs_of<T>(x, parts[0].weight), args.plan = plan;
      set_sell_weights<T>(args, parts, x, kept);
      const Tensor packed = Tensor::empty_packed({args.has_gates ? args.count : 1, plan.token_tiles,
                                                  plan.parts, plan.passes * plan.apart, plan.tokens, 8},
                                                 x.dtype(), device),
                   partial = Tensor::empty_packed({int64_t(plan.windows) * tiles::kTilesOfWindow,
                                                   plan.token_tiles, plan.splits, tiles::kRows, plan.tokens},
                                                  DType::f32, device);
      args.packed = packed.data<T>(), args.partial = partial.data<float>();
      const auto run = [&]<int kTokens>() { launch<T, kTokens>(device, args, swiglu); };
      switch (plan.tokens) {
        case 8:
          return run.template operator()<8>();
        case 16:
          return run.template operator()<16>();
        case 32:
          return run.template operator()<32>();
        default:
          return run.template operator()<64>();
      }
    }
  });
}

}  // namespace

void sparse_sell_wgmma_cuda(const SparseCall& call) {
  multiply(filled_parts(call), false);
}

void sparse_sell_wgmma_swiglu_cuda(const SparseCall& call) {
  multiply(swiglu_parts(call), true);
}

}  // namespace tessera::ops
