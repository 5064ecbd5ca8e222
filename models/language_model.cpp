#include "models/language_model.h"

#include "models/generate.h"

namespace tessera::models {

Tensor LanguageModel::operator()(const Tensor& tokens, Site site) const {
  return visit([&](const auto& model) { return model(tokens, site); });
}
Tensor LanguageModel::operator()(const Tensor& tokens, const nn::Sequences& sequences, Site site) const {
  return visit([&](const auto& model) { return model(tokens, sequences, site); });
}
Tensor LanguageModel::loss(const Tensor& tokens, const Tensor& targets, Site site) const {
  return visit([&](const auto& model) { return model.loss(tokens, targets, site); });
}
Tensor LanguageModel::loss(const Tensor& tokens, const Tensor& targets, const nn::Sequences& sequences,
                           Site site) const {
  return visit([&](const auto& model) { return model.loss(tokens, targets, sequences, site); });
}
int64_t LanguageModel::longest() const {
  return visit([](const auto& model) { return model.longest(); });
}
int64_t LanguageModel::vocabulary() const {
  return visit([](const auto& model) { return model.config.vocabulary; });
}
DType LanguageModel::dtype() const {
  return visit([](const auto& model) { return model.config.dtype; });
}
Device LanguageModel::device() const {
  return visit([](const auto& model) { return model.token.weight.device(); });
}

LanguageConfig LanguageRef::config() const {
  return visit([](const auto& model) -> LanguageConfig { return model.config; });
}
int64_t LanguageRef::blocks() const {
  return visit([](const auto& model) { return int64_t(model.blocks.size()); });
}
DType LanguageRef::dtype() const {
  return visit([](const auto& model) { return model.config.dtype; });
}
Device LanguageRef::device() const {
  return visit([](const auto& model) { return model.token.weight.device(); });
}
nn::AttentionPass LanguageRef::begin(const Tensor& tokens, const nn::Sequences& sequences) const {
  return visit([&](const auto& model) { return model.begin(tokens, sequences); });
}
Residual LanguageRef::embed(const Tensor& tokens, const nn::AttentionPass& pass, Site site) const {
  return visit([&](const auto& model) { return model.embed(tokens, pass, site); });
}
Residual LanguageRef::block(int64_t i, const Residual& x, const nn::AttentionPass& pass, Site site) const {
  return visit([&](const auto& model) { return model.block(i, x, pass, site); });
}

DecodingModel::DecodingModel(const LanguageModel& model, int64_t batch, int64_t capacity)
    : DecodingModel(model.visit([&](const auto& held) { return DecodingModel(held, batch, capacity); })) {}

}  // namespace tessera::models
