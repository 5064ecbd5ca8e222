#include <gtest/gtest.h>

#include <algorithm>

#include "models/bert.h"
#include "models/gpt.h"
#include "models/llama.h"
#include "models/tnp.h"
#include "optim/optimizer.h"

namespace tessera::train {
namespace {

/// The rules as they were before they knew words: by parts of names.
bool decayed(const nn::NamedParameter& parameter) {
  const bool is_bias = parameter.name == "bias" || parameter.name.ends_with(".bias");
  return parameter.tensor.rank() > 1 && !is_bias && parameter.name.find("norm") == std::string::npos;
}

bool was_hidden(const nn::NamedParameter& parameter) {
  if (!decayed(parameter) || parameter.tensor.size(-1) < 2 || parameter.tensor.size(-2) < 2) return false;
  const std::string name = "." + parameter.name;
  return std::ranges::none_of(
      std::initializer_list<const char*>{".token", ".position", ".type", ".embed", ".head", ".lm_head",
                                         ".classifier", ".language"},
      [&](const char* outer) { return name.find(outer) != std::string::npos; });
}

void expect_same_groups(const auto& model) {
  int hidden = 0;
  for (const nn::NamedParameter& parameter : nn::parameters(model)) {
    EXPECT_EQ(optim::decays(parameter), decayed(parameter)) << parameter.name;
    EXPECT_EQ(optim::is_hidden_matrix(parameter), was_hidden(parameter)) << parameter.name;
    hidden += optim::is_hidden_matrix(parameter);
  }
  EXPECT_GT(hidden, 0);
}

TEST(Groups, OfTheBundledModelsAreAsTheyWere) {
  Rng rng(1);
  const Device device = Device::cpu();
  for (const auto family : {models::GptFamily::gpt2, models::GptFamily::opt})
    for (const bool tied : {true, false})
      expect_same_groups(models::Gpt({.family = family,
                                      .vocabulary = 11,
                                      .positions = 8,
                                      .d_model = 8,
                                      .d_ff = 16,
                                      .heads = 2,
                                      .layers = 1,
                                      .tied = tied},
                                     rng, device));
  for (const auto family :
       {models::LlamaFamily::llama, models::LlamaFamily::qwen2, models::LlamaFamily::qwen3})
    expect_same_groups(models::Llama({.family = family,
                                      .vocabulary = 11,
                                      .d_model = 8,
                                      .d_ff = 16,
                                      .heads = 2,
                                      .kv_heads = 1,
                                      .layers = 1},
                                     rng, device));
  const models::BertConfig bert{
      .vocabulary = 11, .positions = 8, .d_model = 8, .d_ff = 16, .heads = 2, .layers = 1};
  expect_same_groups(models::Bert(bert, rng, device));
  expect_same_groups(
      models::Tnp({.d_model = 16, .d_ff = 32, .heads = 2, .layers = 1, .components = 2, .embed_hidden = 16},
                  rng, device));
}

}  // namespace
}  // namespace tessera::train
