#include "ops/decoder_layers/decoder_layers_sm90.cuh"
#include "ops/decoder_layers/decoder_sell.cuh"

namespace tessera::ops::decoder {
namespace {

/// visit(index, matrix) for the matrices of a layer.
template <class Visit>
void for_each_matrix(const SparseDecoderLayer& layer, Visit&& visit) {
  for (size_t i = 0; i < layer.qkv.size(); ++i) visit(int(i), layer.qkv[i]);
  visit(3, layer.out[0]), visit(4, layer.up[0]), visit(5, layer.up[1]), visit(6, layer.down[0]);
}

template <class T, int kDim>
void run_sell(const Problem<SparseDecoderLayer>& p) {
  using Weights = SellWeights<T>;
  static_assert(kWarps == kSellWarps && sizeof(AttentionShared<T, kDim>) <= size_t(kSellAttentionBytes) &&
                kSmallBytes <= size_t(kSellOtherBytes));
  const Device device = p.x.device();
  const SparseDecoderLayer& first = p.layers[0];
  const SellDecoderPlan plan = plan_sell_decoder(first, device.multiprocessors());
  const int64_t mixed = first.out[0].in, hidden = first.down[0].in;
  int64_t rows = 0;
  for (const SparseWeight& part : first.qkv) rows += part.out;
  Scratch scratch;
  Args<Weights> args = args_of<Weights>(p, {mixed, hidden}, rows, scratch, 2 * hidden);
  args.stages = plan.stages;
  std::ranges::copy(plan.gemv, args.plan.gemv);
  std::ranges::copy(plan.first_slice, args.plan.first_slice);
  std::ranges::copy(plan.first_row, args.plan.first_row);
  args.plan.gated = scratch.floats.data<float>() + scratch.floats.count() - 2 * hidden;
  const auto set_rows = [&](int matrix, const SparseWeight& weight) {
    args.plan.rows[matrix] = int(weight.out);
  };
  for_each_matrix(first, set_rows);
  for (size_t l = 0; l < p.layers.size(); ++l) {
    const SparseDecoderLayer& from = p.layers[l];
    const auto set = [&](int matrix, const SparseWeight& weight) {
      args.layer[l].weights.matrix[matrix] = {
          static_cast<const char*>(weight.values.raw()), static_cast<const char*>(weight.gaps.raw()),
          static_cast<const uint32_t*>(weight.info.raw()), weight.offsets.data<int32_t>()};
    };
    for_each_matrix(from, set);
  }
  launch<Weights, kDim>(device, args, size_t(plan.vector_bytes), size_t(plan.sum_bytes));
}

}  // namespace

void decoder_layers_cuda(const Problem<SparseDecoderLayer>& p) {
  with_dtype_and_dim(p, [&]<class T, int kDim>() { run_sell<T, kDim>(p); });
}

}  // namespace tessera::ops::decoder
