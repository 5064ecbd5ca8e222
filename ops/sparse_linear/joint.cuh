#pragma once

#include <array>
#include <span>
#include <utility>
#include <vector>

#include "ops/sparse_linear/gated.cuh"
#include "ops/sparse_linear/joint_plan.h"
#include "ops/swiglu/swiglu_math.h"

/// What the kernels of variants "sell_joint" and "columns_joint" share: several weights in one launch.

namespace tessera::ops::sparse {

/// The weight of a launch that a tile of outputs belongs to. Comparing instead of indexing leaves the
/// parameters in constant memory.
template <class Weight>
__device__ __forceinline__ int weight_of_tile(const Weight (&weights)[kJointWeights], int count, int tile) {
  int found = 0;
#pragma unroll
  for (int i = 1; i < kJointWeights; ++i)
    if (i < count && tile >= weights[i].first_tile) found = i;
  return found;
}
template <class Weight>
__device__ __forceinline__ Weight pick(const Weight (&weights)[kJointWeights], int index) {
  Weight weight = weights[0];
#pragma unroll
  for (int i = 1; i < kJointWeights; ++i)
    if (i == index) weight = weights[i];
  return weight;
}

/// A sell_delta4 weight of a launch; its windows are tiles first_tile and following.
template <class T>
struct SellWeight {
  Output<T> to;
  const uint4* values;
  const uint32_t *gaps, *rows;
  const int32_t* offsets;
  DeviceGate gate;
  int first_tile;
  bool constant;
};

/// `kept` holds what the launch reads beyond the call's tensors.
template <class T>
SellWeight<T> sell_weight_of(const SparsePartCall& part, const Tensor& x, int first_tile,
                             std::vector<Tensor>& kept) {
  const SparseWeight& weight = part.weight;
  const auto words = [](const Tensor& array) { return static_cast<const uint32_t*>(array.raw()); };
  const Tensor residual = kept.emplace_back(dense_rows(part.residual));
  return {.to = output_of<T>(part, residual),
          .values = static_cast<const uint4*>(weight.values.raw()),
          .gaps = words(weight.gaps),
          .rows = words(weight.info),
          .offsets = weight.offsets.template data<int32_t>(),
          .gate = device_gate(part.gate, x, kept.emplace_back()),
          .first_tile = first_tile,
          .constant = weight.constant};
}

/// Sets the weights of a launch's arguments, how many there are, whether all are constant and any has a gate.
template <class T, class Args>
void set_sell_weights(Args& args, std::span<const SparsePartCall> parts, const Tensor& x,
                      std::vector<Tensor>& kept) {
  args.count = int(parts.size()), args.constant = true, args.has_gates = false;
  int windows = 0;
  for (size_t i = 0; i < parts.size(); ++i) {
    args.weights[i] = sell_weight_of<T>(parts[i], x, windows, kept);
    args.constant &= parts[i].weight.constant;
    args.has_gates |= parts[i].gate.kind != Gate::Kind::none;
    windows += int(parts[i].weight.group_rows());
  }
}

/// Gate and up of a call with SwiGLU, whose y is one.
inline std::array<SparsePartCall, 2> swiglu_parts(const SparseCall& call) {
  const auto part = [&](const SparsePart& of) {
    return SparsePartCall{call.y, call.x, of.weight, of.gate, {}, {}};
  };
  return {part(call.parts[0]), part(call.parts[1])};
}

/// The parts of a call that are not empty: at most kJointWeights.
inline std::vector<SparsePartCall> filled_parts(const SparseCall& call) {
  std::vector<SparsePartCall> parts;
  for_each_part(call, [&](const SparsePartCall& part) { parts.push_back(part); });
  return parts;
}

/// Tiles of outputs of a launch, as plans count them.
inline int64_t tiles_of(std::span<const SparsePartCall> parts, bool swiglu) {
  int64_t tiles = 0;
  for (const SparsePartCall& part : swiglu ? parts.first(1) : parts)
    tiles += gpu::ceil_div(part.weight.out, kTileRows);
  return tiles;
}

/// Says the plan of a launch where choices are explained.
inline void explain(const char* variant, const JointPlan& plan, const JointShape& shape, Device device) {
  if (ChoiceLog* const log = ChoiceLog::current())
    log->add(text_of(variant, ": ", describe(plan, shape, Gpu(device).multiprocessors)));
}

}  // namespace tessera::ops::sparse
