#include "nn/sparse24.h"

#include "autograd/checkpoint.h"
#include "nn/low_rank.h"

namespace tessera::nn {

namespace {

/// The form with the state of a network with these weights [hidden, in] and [out, hidden].
Sparse24 with_state(Sparse24 form, const Tensor& up, const Tensor& down) {
  check(form.order == "none" || form.order == "random" || form.order == "stride",
        "sparse24: the order of tokens is \"", form.order, "\"; expected none, random or stride");
  if (form.how.method == ops::Method24::soft_threshold && !form.how.scale.defined())
    form.how.scale = ops::soft_scale(down.detach());
  form.counts = Tensor::zeros({up.size(0)}, DType::i32, up.device());
  form.dynamic.scale = Tensor::full({1}, 1, DType::f32, up.device());
  form.how.dynamic = &form.dynamic;
  form.how.validate("sparse24");
  form.how.dynamic = nullptr;  // set per call: forms are copied
  return form;
}

}  // namespace

void set_sparse24(Mlp& mlp, Sparse24 form) {
  check(!mlp.gated,
        "sparse24: the network has a gate, whose product with the hidden features has no zeros; it needs one "
        "without (relu or relu_squared)");
  check(mlp.activation == form.how.activation, "sparse24: the network's activation is ",
        ops::name_of(mlp.activation), ", that of the form ", ops::name_of(form.how.activation));
  auto* const first = std::get_if<LowRank>(&mlp.up.form);
  const auto* const second = std::get_if<LowRank>(&mlp.down.form);
  if (first && second) {
    check(first->factors.rows.size() == 1 && second->factors.rows.size() == 1,
          "sparse24: the low_rank layers of the network have ", first->factors.rows.size(), " and ",
          second->factors.rows.size(), " parts; 2:4 activations need layers of one part");
    first->sparse24 = {with_state(std::move(form), first->factors.b, second->factors.a)};
    return;
  }
  for (const Linear* const layer : {&mlp.up, &mlp.down})
    check(is_dense(layer->form) || std::holds_alternative<Sparse24>(layer->form),
          "sparse24: a layer of the network has the form ", name_of(layer->form),
          "; 2:4 activations need dense weights, or low_rank ones in both layers");
  form = with_state(std::move(form), mlp.up.weight, mlp.down.weight);
  mlp.up.form = form;
  form.counts = Tensor();
  form.dynamic.scale = Tensor();
  mlp.down.form = std::move(form);
}

void set_sparse24(Linear& layer, const Sparse24& form) {
  auto* const cola = std::get_if<Cola>(&layer.form);
  check(cola != nullptr, "sparse24: the layer has the form ", name_of(layer.form),
        "; of linear layers only cola has activations inside");
  check(cola->activation == form.how.activation, "sparse24: the activation between the layer's factors is ",
        ops::name_of(cola->activation), ", that of the form ", ops::name_of(form.how.activation));
  std::vector<Sparse24> parts;
  for (const FactorPair& pair : pairs_of(cola->factors)) parts.push_back(with_state(form, pair.a, pair.b));
  cola->sparse24 = std::move(parts);
}

const Sparse24* sparse24_of(const Mlp& mlp) {
  if (const auto* const first = std::get_if<LowRank>(&mlp.up.form); first && !first->sparse24.empty()) {
    check(std::holds_alternative<LowRank>(mlp.down.form) && !mlp.gated,
          "sparse24: the first layer is low_rank with 2:4 activations, but the second is ",
          name_of(mlp.down.form), mlp.gated ? ", and there is a gate" : "",
          "; set the form with nn::set_sparse24");
    return first->sparse24.data();
  }
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

std::span<const Sparse24> sparse24_of(const Linear& layer) {
  const auto* const cola = std::get_if<Cola>(&layer.form);
  return cola ? std::span<const Sparse24>(cola->sparse24) : std::span<const Sparse24>();
}

std::span<Sparse24> sparse24_of(Linear& layer) {
  auto* const cola = std::get_if<Cola>(&layer.form);
  return cola ? std::span<Sparse24>(cola->sparse24) : std::span<Sparse24>();
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

ops::MlpSparse24Result run_sparse24(const Sparse24& form, bool l1, const Tensor& x, const Tensor& up,
                                    const Tensor& down, const Tensor& up_bias, const Tensor& down_bias,
                                    const Tensor& residual) {
  ops::MlpSparse24 how = call_of(form, x);
  how.l1 = l1;
  if (how.splits()) how.previous = state_of_first_run(form.counts);
  const bool again = recomputing(), scales = how.method == ops::Method24::soft_dynamic;
  ops::DynamicScale24 fixed;
  if (again && scales) {
    fixed = {.step = 1, .scale = state_of_first_run({})};  // not refreshed at this step
    how.dynamic = &fixed;
  }
  ops::MlpSparse24Result result = ops::mlp_sparse24(x, up, down, how, up_bias, down_bias, residual);
  if (!again) {
    if (scales) state_of_first_run(form.dynamic.scale);
    // Nothing else reads them, and on several ranks each would store its own.
    if (form.how.splits()) form.counts.copy_from(result.counts);
  }
  return result;
}

ops::MlpSparse24 dense_call(ops::Activation activation) {
  constexpr ops::Gemm24 kDense = ops::Gemm24::dense;
  return {.activation = activation, .y = kDense, .dx = kDense, .dup = kDense, .ddown = kDense};
}

}  // namespace tessera::nn
