#include "nn/sparse24.h"

namespace tessera::nn {

void set_sparse24(Mlp& mlp, Sparse24 form) {
  check(!mlp.gated,
        "sparse24: the network has a gate, whose product with the hidden features has no zeros; it needs one "
        "without (relu or relu_squared)");
  check(mlp.activation == form.how.activation, "sparse24: the network's activation is ",
        ops::name_of(mlp.activation), ", that of the form ", ops::name_of(form.how.activation));
  for (const Linear* const layer : {&mlp.up, &mlp.down})
    check(is_dense(layer->form) || std::holds_alternative<Sparse24>(layer->form),
          "sparse24: a layer of the network has the form ", name_of(layer->form),
          "; 2:4 activations need dense weights");
  check(form.order == "none" || form.order == "random" || form.order == "stride",
        "sparse24: the order of tokens is \"", form.order, "\"; expected none, random or stride");
  const Tensor weight = mlp.up.weight;
  if (form.how.method == ops::Method24::soft_threshold && !form.how.scale.defined())
    form.how.scale = ops::soft_scale(mlp.down.weight.detach());
  form.counts = Tensor::zeros({weight.size(0)}, DType::i32, weight.device());
  form.dynamic.scale = Tensor::full({1}, 1, DType::f32, weight.device());
  form.how.dynamic = &form.dynamic;
  form.how.validate("sparse24");
  form.how.dynamic = nullptr;  // set per call: forms are copied
  mlp.up.form = form;
  form.counts = Tensor();
  form.dynamic.scale = Tensor();
  mlp.down.form = std::move(form);
}

const Sparse24* sparse24_of(const Mlp& mlp) {
  const auto* const one = std::get_if<Sparse24>(&mlp.up.form);
  const auto* const other = std::get_if<Sparse24>(&mlp.down.form);
  if (!one && !other) return nullptr;
  check(one && other && !mlp.gated && one->counts.defined(),
        "sparse24: the form is of both layers of a network without a gate; set it with nn::set_sparse24");
  return one;
}

Sparse24* sparse24_of(Mlp& mlp) {
  return const_cast<Sparse24*>(sparse24_of(std::as_const(mlp)));
}

ops::MlpSparse24 call_of(const Sparse24& form, const Tensor& x) {
  ops::MlpSparse24 how = form.how;
  how.previous = form.counts;
  how.dynamic = &form.dynamic;
  if (!form.active) how.y = how.dx = how.dup = how.ddown = ops::Gemm24::dense;
  if (!form.active) how.masks_gradient = true;
  const int64_t tokens = x.rank() > 1 ? x.count() / std::max<int64_t>(1, x.size(-1)) : 1;
  if (form.order != "none" && (!form.tokens.defined() || form.tokens.count() != tokens))
    form.tokens = ops::token_order24(form.order, tokens, form.seed, x.device());
  if (form.order != "none") how.order = form.tokens;
  return how;
}

ops::MlpSparse24 dense_call(ops::Activation activation) {
  constexpr ops::Gemm24 kDense = ops::Gemm24::dense;
  return {.activation = activation, .y = kDense, .dx = kDense, .dup = kDense, .ddown = kDense};
}

}  // namespace tessera::nn
