#pragma once

#include <utility>
#include <variant>

#include "models/gpt.h"
#include "models/llama.h"

/// Either of the causal language models, for programs that learn from a file which one they run.

namespace tessera::models {

using LanguageConfig = std::variant<GptConfig, LlamaConfig>;

/// A Gpt or a Llama. Its parts have the names that they have in that model: "blocks.3.mlp.up".
class LanguageModel {
 public:
  LanguageModel(Gpt model) : model_(std::move(model)) {}
  LanguageModel(Llama model) : model_(std::move(model)) {}

  /// As those of Gpt. To generate: models::generate and models::Generator.
  Tensor operator()(const Tensor& tokens, Site site = Site::here()) const;
  Tensor operator()(const Tensor& tokens, const nn::Sequences& sequences, Site site = Site::here()) const;
  Tensor loss(const Tensor& tokens, const Tensor& targets, Site site = Site::here()) const;
  Tensor loss(const Tensor& tokens, const Tensor& targets, const nn::Sequences& sequences,
              Site site = Site::here()) const;

  int64_t longest() const;  // sequence
  int64_t vocabulary() const;
  DType dtype() const;
  Device device() const;

  /// f(model) of the Gpt or the Llama.
  template <class F>
  decltype(auto) visit(F&& f) {
    return std::visit(std::forward<F>(f), model_);
  }
  template <class F>
  decltype(auto) visit(F&& f) const {
    return std::visit(std::forward<F>(f), model_);
  }
  /// Model: Gpt or Llama. Null if it is the other one.
  template <class Model>
  Model* get_if() {
    return std::get_if<Model>(&model_);
  }
  template <class Model>
  const Model* get_if() const {
    return std::get_if<Model>(&model_);
  }

  void fields(auto&& visit) { visit("", model_); }

 private:
  std::variant<Gpt, Llama> model_;
};

/// A Gpt, a Llama or a LanguageModel that lives elsewhere and outlives it: the parameter of functions that
/// take any of them, and may change it.
class LanguageRef {
 public:
  LanguageRef(Gpt& model) : model_(&model) {}
  LanguageRef(Llama& model) : model_(&model) {}
  LanguageRef(LanguageModel& model)
      : LanguageRef(model.visit([](auto& held) { return LanguageRef(held); })) {}

  LanguageConfig config() const;
  int64_t blocks() const;
  DType dtype() const;
  Device device() const;

  /// The stages of a pass up to the last block, as those of Gpt.
  nn::AttentionPass begin(const Tensor& tokens, const nn::Sequences& sequences) const;
  Residual embed(const Tensor& tokens, const nn::AttentionPass& pass, Site site = Site::here()) const;
  Residual block(int64_t i, const Residual& x, const nn::AttentionPass& pass, Site site = Site::here()) const;

  /// f(model) of the Gpt or the Llama.
  template <class F>
  decltype(auto) visit(F&& f) const {
    return std::visit([&](auto* model) -> decltype(auto) { return f(*model); }, model_);
  }

 private:
  std::variant<Gpt*, Llama*> model_;
};

}  // namespace tessera::models
