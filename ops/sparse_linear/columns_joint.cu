#include "ops/sparse_linear/columns_joint.cuh"

namespace tessera::ops {
namespace {

using namespace sparse;

template <class T, int kIndex>
void launch(Device device, const JointPlan& plan, const ColumnJointArgs<T>& args) {
  constexpr JointShape kOf = kColumnShapes[kIndex];
  gpu::launch(device,
              {.grid = dim3(unsigned(plan.tiles * plan.blocks)),
               .block = unsigned(kOf.groups * kColumnThreads),
               .shared_bytes = size_t(kOf.groups) * sizeof(ColumnShared<kOf.tokens>),
               .cluster = plan.blocks,
               .overlaps = true},
              multiply_joint_columns<T, kOf.tokens, kOf.groups, kOf.ahead, kOf.per_sm, kOf.swiglu>, args);
}

/// One launch: up to kJointWeights weights, or gate and up.
void multiply(std::span<const SparsePartCall> parts, bool swiglu) {
  const Device device = parts[0].x.device();
  const Tensor x = dense_rows(parts[0].x);
  const JointPlan plan = plan_columns(tiles_of(parts, swiglu), parts[0].weight.in, x.size(0), swiglu,
                                      Gpu(device).multiprocessors);
  check(!*plan.lacks, "sparse_linear: variant columns_joint needs ", plan.lacks);
  explain("columns_joint", plan, kColumnShapes[plan.shape], device);
  dispatch_floating_cuda(x.dtype(), "sparse_linear", [&]<class T>() {
    if constexpr (sizeof(T) == 2) {
      std::vector<Tensor> kept;  // until the launch is issued
      ColumnJointArgs<T> args{.weights = {},
                              .x = {.x = x.data<T>(),
                                    .stride = x.layout().stride(0),
                                    .tokens = int(x.size(0)),
                                    .in = int(x.size(1))},
                              .count = int(parts.size()),
                              .blocks = plan.blocks,
                              .range = plan.steps,
                              .early = plan.early};
      int tiles = 0;
      for (size_t i = 0; i < parts.size(); ++i) {
        const SparsePartCall& part = parts[i];
        const Tensor values = gpu::pack_aligned_or_copy<T>(part.weight.values),
                     residual = dense_rows(part.residual);
        Tensor bits;
        const DeviceGate gate = device_gate(part.gate, x, bits);
        args.weights[i] = {.to = output_of<T>(part, residual),
                           .values = values.template data<T>(),
                           .column_stride = values.layout().stride(0),
                           .gate = gate,
                           .first_tile = tiles};
        kept.insert(kept.end(), {values, residual, bits});
        tiles += int(gpu::ceil_div(part.weight.out, kTileOutputs));
      }
      [&]<size_t... kIndex>(std::index_sequence<kIndex...>) {
        ((plan.shape == int(kIndex) ? launch<T, int(kIndex)>(device, plan, args) : void()), ...);
      }
      (std::make_index_sequence<std::size(kColumnShapes)>{});
    }
  });
}

}  // namespace

void sparse_columns_joint_cuda(const SparseCall& call) {
  multiply(filled_parts(call), false);
}

void sparse_columns_swiglu_cuda(const SparseCall& call) {
  multiply(swiglu_parts(call), true);
}

}  // namespace tessera::ops
