#include "ops/sparse_linear/mma_delta4.cuh"

namespace tessera::ops {
namespace {

using namespace sparse;

template <class T, int kTokens>
void launch(Device device, const MmaPlan& plan, const streams::Args<T>& args, bool swiglu) {
  gpu::launch(device,
              {.grid = dim3(unsigned(plan.blocks)),
               .block = streams::kThreads,
               .shared_bytes = streams::kSharedBytes<kTokens>,
               .overlaps = true},
              multiply_streams<T, kTokens>, args);
  const gpu::LaunchShape adds{.grid = dim3(unsigned(plan.windows / (swiglu ? 2 : 1) * (kWindow / kAddRows)),
                                           unsigned(plan.token_tiles * kTokens / 8)),
                              .block = unsigned(kAddThreads)};
  if (swiglu)
    gpu::launch_dependent(device, adds, add_parts<T, true>, args);
  else
    gpu::launch_dependent(device, adds, add_parts<T, false>, args);
}

/// Up to kJointWeights weights; with swiglu gate and up, whose y is one.
void multiply(std::span<const SparsePartCall> parts, bool swiglu) {
  const Device device = parts[0].x.device();
  const Tensor x = dense_rows(parts[0].x);
  const MmaPlan plan =
      plan_mma(tiles_of(parts, false), parts[0].weight.in, x.size(0), Gpu(device).multiprocessors);
  check(!*plan.lacks, "sparse_linear: variant mma needs ", plan.lacks);
  if (ChoiceLog* const log = ChoiceLog::current()) log->add(text_of("mma: ", describe(plan)));
  dispatch_floating_cuda(x.dtype(), "sparse_linear", [&]<class T>() {
    if constexpr (sizeof(T) == 2) {
      std::vector<Tensor> kept;  // until the launch is issued
      const Tensor partial = Tensor::empty_packed(
          {int64_t(plan.token_tiles) * plan.tokens / 8, plan.parts, plan.strips(), mma_delta4::kStripRows, 8},
          DType::f32, device);
      streams::Args<T> args{.weights = {},
                            .x = x.data<T>(),
                            .x_stride = x.layout().stride(0),
                            .tokens = int(x.size(0)),
                            .in = int(x.size(1)),
                            .parts = plan.parts,
                            .strips = plan.strips(),
                            .token_tiles = plan.token_tiles,
                            .partial = partial.data<float>(),
                            .has_packs = reinterpret_cast<uintptr_t>(x.raw()) % 16 == 0 &&
                                         (x.size(0) == 1 || x.layout().stride(0) % 8 == 0)};
      set_sell_weights<T>(args, parts, x, kept);
      if (plan.tokens == 8)
        launch<T, 8>(device, plan, args, swiglu);
      else if (plan.tokens == 16)
        launch<T, 16>(device, plan, args, swiglu);
      else
        launch<T, 32>(device, plan, args, swiglu);
    }
  });
}

}  // namespace

void sparse_mma_cuda(const SparseCall& call) {
  multiply(filled_parts(call), false);
}

void sparse_mma_swiglu_cuda(const SparseCall& call) {
  multiply(swiglu_parts(call), true);
}

}  // namespace tessera::ops
