#include "ops/sparse_linear/sell_joint.cuh"

namespace tessera::ops {
namespace {

using namespace sparse;

template <class T, int kIndex>
void launch(Device device, const JointPlan& plan, const SellJointArgs<T>& args) {
  constexpr JointShape kOf = kSellShapes[kIndex];
  gpu::launch(device,
              {.grid = dim3(unsigned(plan.tiles * plan.blocks)),
               .block = unsigned(kOf.groups * kWindow),
               .shared_bytes = size_t(plan.shared),
               .cluster = plan.blocks,
               .overlaps = true},
              multiply_joint_slices<T, SellShape<kOf.tokens, kOf.groups, kOf.ahead, kOf.per_sm>, kOf.swiglu>,
              args);
}

/// One launch: up to kJointWeights weights, or gate and up.
void multiply(std::span<const SparsePartCall> parts, bool swiglu) {
  const Device device = parts[0].x.device();
  const Tensor x = dense_rows(parts[0].x);
  const JointPlan plan =
      plan_sell(tiles_of(parts, swiglu), parts[0].weight.in, x.size(0), swiglu, Gpu(device).multiprocessors);
  check(!*plan.lacks, "sparse_linear: variant sell_joint needs ", plan.lacks);
  explain("sell_joint", plan, kSellShapes[plan.shape], device);
  dispatch_floating_cuda(x.dtype(), "sparse_linear", [&]<class T>() {
    if constexpr (sizeof(T) == 2) {
      std::vector<Tensor> kept;  // until the launch is issued
      SellJointArgs<T> args{.weights = {},
                            .x = inputs_of<T>(x, parts[0].weight),
                            .count = int(parts.size()),
                            .blocks = plan.blocks,
                            .steps = plan.steps,
                            .early = plan.early};
      int tiles = 0;
      for (size_t i = 0; i < parts.size(); ++i) {
        args.weights[i] = sell_weight_of<T>(parts[i], x, tiles, kept);
        tiles += int(parts[i].weight.group_rows());
      }
      [&]<size_t... kIndex>(std::index_sequence<kIndex...>) {
        ((plan.shape == int(kIndex) ? launch<T, int(kIndex)>(device, plan, args) : void()), ...);
      }
      (std::make_index_sequence<std::size(kSellShapes)>{});
    }
  });
}

}  // namespace

void sparse_sell_joint_cuda(const SparseCall& call) {
  multiply(filled_parts(call), false);
}

void sparse_sell_swiglu_cuda(const SparseCall& call) {
  multiply(swiglu_parts(call), true);
}

}  // namespace tessera::ops
