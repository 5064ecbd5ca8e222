#include "ops/decoder_layers/decoder_dense.cuh"
#include "ops/decoder_layers/decoder_layers_sm90.cuh"

namespace tessera::ops::decoder {
namespace {

template <class T, int kDim>
void run_dense(const Problem<DecoderLayer>& p) {
  const DecoderLayer& first = p.layers[0];
  const int64_t mixed = first.out.size(1), hidden = first.down.size(1);
  Scratch scratch;
  Args<DenseWeights<T>> args = args_of<DenseWeights<T>>(p, {mixed, hidden}, first.qkv.size(0), scratch);
  const Tensor* const weights[kPhases] = {&first.qkv, nullptr, &first.out, &first.up, &first.down};
  for (int phase = 0; phase < kPhases; ++phase) {
    if (!weights[phase]) continue;
    args.plan.stride[phase] = weights[phase]->layout().stride(0);
    args.plan.units[phase] = int(weights[phase]->size(0) / 2);
  }
  for (size_t l = 0; l < p.layers.size(); ++l) {
    const DecoderLayer& from = p.layers[l];
    args.layer[l].weights = {
        {from.qkv.data<T>(), nullptr, from.out.data<T>(), from.up.data<T>(), from.down.data<T>()}};
  }
  // A wide vector leaves room for fewer stages.
  const size_t vector = size_t(std::max({p.x.size(1), mixed, hidden})) * sizeof(T);
  while (shared_bytes<DenseWeights<T>, kDim>(args.stages, vector) > size_t(kSharedBytes)) --args.stages;
  launch<DenseWeights<T>, kDim>(p.x.device(), args, vector, 0);
}

}  // namespace

void decoder_layers_cuda(const Problem<DecoderLayer>& p) {
  with_dtype_and_dim(p, [&]<class T, int kDim>() { run_dense<T, kDim>(p); });
}

}  // namespace tessera::ops::decoder
