#pragma once

#include "models/bert.h"
#include "models/gpt.h"
#include "models/llama.h"
#include "models/tnp.h"
#include "ops/random/random.h"
#include "tests/tensors.h"

/// Models of a few thousand parameters, in f64 unless told otherwise, which tests share.

namespace tessera::models {

inline Tensor tokens_of(std::vector<int64_t> values, const Shape& shape) {
  return Tensor::from(values, shape);
}

inline GptConfig small_gpt(GptFamily family = GptFamily::gpt2) {
  return {.family = family,
          .vocabulary = 19,
          .positions = 16,
          .d_model = 12,
          .d_ff = 20,
          .heads = 3,
          .layers = 2,
          .init_deviation = 0.3,
          .dtype = DType::f64};
}
inline LlamaConfig small_llama(ops::RopeScaling scaling = ops::RopeScaling::none) {
  return {.vocabulary = 19,
          .positions = 16,
          .d_model = 12,
          .d_ff = 20,
          .heads = 4,
          .kv_heads = 2,
          .head_dim = 6,
          .layers = 2,
          .rope = {.scaling = scaling, .factor = 2, .trained_length = 4},
          .init_deviation = 0.3,
          .dtype = DType::f64};
}
/// A family with all that is its own: phi3 rotates 4 of 6 elements, by other angles beyond 5 tokens.
inline LlamaConfig small_family(LlamaFamily family) {
  LlamaConfig config = small_llama();
  config.family = family;
  const bool is_arcee = family == LlamaFamily::arcee;
  config.window = family == LlamaFamily::llama || is_arcee ? 0 : 12;
  if (is_arcee) config.gated = false, config.activation = ops::Activation::relu_squared;
  if (family != LlamaFamily::phi3) return config;
  config.partial_rotary = 0.7;
  config.rope = {.base = 100,
                 .scaling = ops::RopeScaling::longrope,
                 .factor = 3,
                 .trained_length = 5,
                 .short_factor = {1, 1.3},
                 .long_factor = {1.5, 4}};
  return config;
}
inline constexpr LlamaFamily kFamilies[] = {LlamaFamily::llama, LlamaFamily::mistral, LlamaFamily::qwen2,
                                            LlamaFamily::qwen3, LlamaFamily::phi3,    LlamaFamily::arcee};

inline BertConfig small_bert(BertHead head, BertFamily family = BertFamily::bert) {
  return {.family = family,
          .vocabulary = 19,
          .positions = 12,
          .d_model = 12,
          .d_ff = 20,
          .heads = 3,
          .layers = 2,
          .pad_token = 1,
          .head = head,
          .labels = 3,
          .init_deviation = 0.3,
          .dtype = DType::f64};
}

inline TnpConfig small_tnp(bool pre_norm = false) {
  return {.features = 2,
          .d_model = 12,
          .d_ff = 20,
          .heads = 3,
          .layers = 2,
          .components = 2,
          .embed_hidden = 8,
          .pre_norm = pre_norm,
          .dtype = DType::f64};
}

/// Calls `f(const std::string& what, auto& model)` with every kind of model that there is: families, heads,
/// tied and untied, feed-forward networks with and without gate and biases.
template <class F>
void for_each_model(F&& f, DType dtype = DType::f64, Device device = kCpu) {
  Rng rng(3);
  const auto make = [&]<class Model>(const std::string& what, auto config, const Model*) {
    config.dtype = dtype;
    Model model(config, rng, device);
    f(what, model);
  };
  const Gpt* const gpt = nullptr;
  const Llama* const llama = nullptr;
  const Bert* const bert = nullptr;
  const Tnp* const tnp = nullptr;
  make("gpt2", small_gpt(), gpt);
  make("opt", small_gpt(GptFamily::opt), gpt);
  GptConfig untied = small_gpt();
  untied.tied = false;
  make("gpt2 untied", untied, gpt);
  for (const LlamaFamily family : kFamilies) make(name_of(family), small_family(family), llama);
  LlamaConfig config = small_llama();
  config.tied = config.attention_bias = config.mlp_bias = true;
  make("llama tied, with biases", config, llama);
  config.activation = ops::Activation::gelu;
  make("llama with GeGLU", config, llama);
  config.gated = false;
  make("llama without gate", config, llama);
  for (const BertFamily family : {BertFamily::bert, BertFamily::roberta})
    for (const BertHead head : {BertHead::classify, BertHead::regress, BertHead::masked_lm})
      make(
          std::string(family == BertFamily::bert ? "bert" : "roberta") + " head " + std::to_string(int(head)),
          small_bert(head, family), bert);
  for (const bool pre_norm : {false, true}) {
    make(pre_norm ? "tnp pre-norm" : "tnp", small_tnp(pre_norm), tnp);
    TnpConfig checkpointed = small_tnp(pre_norm);
    checkpointed.checkpoint_every = 1;
    make(pre_norm ? "tnp pre-norm checkpointed" : "tnp checkpointed", checkpointed, tnp);
  }
}

/// A batch for each model, on its device, and its loss.
inline const nn::Sequences kSmallSequences{{4, 3}};
inline Tensor small_tokens(Device device = kCpu) {
  return tokens_of({4, 7, 2, 9, 5, 11, 3}, {7}).to(device);
}
inline Tensor small_targets(Device device = kCpu) {
  return tokens_of({7, 2, 9, -100, 11, 3, 8}, {7}).to(device);
}
inline BertBatch small_bert_batch(Device device = kCpu) {
  return {small_tokens(device), {}, kSmallSequences};
}
inline Tensor small_bert_targets(const Bert& model) {
  const Device device = model.token.weight.device();
  if (model.config.head == BertHead::masked_lm) return small_targets(device);
  if (model.config.head == BertHead::classify) return tokens_of({2, 0}, {2}).to(device);
  return Tensor::from(std::vector<float>{0.5, -2}, {2}).to(device);
}
inline TnpBatch small_tnp_batch(DType dtype = DType::f64, Device device = kCpu) {
  Rng rng(5);
  const auto random = [&](const Shape& shape) {
    const Tensor tensor = Tensor::empty(shape, DType::f64, kCpu);
    ops::fill_normal(tensor, 0, 1, rng);
    return tensor.to(dtype).to(device);
  };
  return {random({2, 4, 2}), random({2, 4, 1}), random({2, 3, 2}), random({2, 3, 1})};
}

template <class Model>
Tensor small_loss(const Model& model) {
  if constexpr (std::is_same_v<Model, Tnp>) {
    return model.loss(small_tnp_batch(model.config.dtype, model.embedder.up.weight.device()));
  } else {
    const Device device = model.token.weight.device();
    if constexpr (std::is_same_v<Model, Bert>)
      return model.loss(small_bert_batch(device), small_bert_targets(model));
    else
      return model.loss(small_tokens(device), small_targets(device), kSmallSequences);
  }
}

}  // namespace tessera::models
