#include "nn/weights24.h"

#include "ops/bits/bits.h"
#include "ops/pointwise/pointwise.h"
#include "ops/sparse24/weight24.h"

namespace tessera::nn {

void set_weights24(Linear& layer, const std::optional<Rng>& mvue) {
  check(is_dense(layer.form), "weights24: the layer has the form ", name_of(layer.form),
        "; 2:4 weights are masks of dense ones");
  check(layer.weight.defined(), "weights24: the layer is tied to another's weight and has none of its own");
  const Tensor weight = layer.weight.detach();
  layer.form =
      Weights24{ops::transposable24(weight), Tensor::zeros({1}, DType::i32, weight.device()), true, mvue};
}

Weights24* weights24_of(Linear& layer) {
  return std::get_if<Weights24>(&layer.form);
}
const Weights24* weights24_of(const Linear& layer) {
  return std::get_if<Weights24>(&layer.form);
}

void refresh_weights24(Linear& layer) {
  Weights24* const form = weights24_of(layer);
  check(form != nullptr, "weights24: the layer has the form ", name_of(layer.form),
        "; nn::set_weights24 gives it 2:4 weights");
  const Tensor mask = ops::transposable24(layer.weight.detach());
  form->flips.copy_from(ops::count_differences(form->mask, mask));
  form->mask.copy_from(mask);
}

Tensor masked_decay(const Linear& layer) {
  const Weights24* const form = weights24_of(layer);
  return form && form->active ? ops::masked_decay24(layer.weight, form->mask) : Tensor();
}

Tensor masked_weight(const Linear& layer) {
  const Weights24* const form = weights24_of(layer);
  const Tensor weight = layer.weight.detach();
  return form && form->active ? ops::mul(weight, ops::unpack_bits(form->mask, weight.size(1), weight.dtype()))
                              : weight;
}

}  // namespace tessera::nn
