#include "models/language_model.h"

#include <gtest/gtest.h>

#include "autograd/tape.h"
#include "models/generate.h"
#include "tests/models/small_models.h"

// Either of the causal models in one type, and references to them.

namespace tessera::models {
namespace {

template <class F>
void for_either(F&& f) {
  Rng rng(3);
  f(Gpt(small_gpt(), rng, kCpu));
  f(Llama(small_llama(), rng, kCpu));
}

std::vector<std::string> names_of(const std::vector<nn::NamedParameter>& parameters) {
  std::vector<std::string> names;
  for (const nn::NamedParameter& parameter : parameters) names.push_back(parameter.name);
  return names;
}

TEST(LanguageModel, ComputesAsTheModelInIt) {
  for_either([](const auto& held) {
    const LanguageModel model = held;
    const NoTape no_tape;
    const Tensor tokens = tokens_of({3, 1, 4, 1, 5, 9, 2, 6}, {2, 4}), flat = tokens.reshape({8});
    const nn::Sequences sequences{.lengths = {5, 3}};
    EXPECT_EQ(largest_difference(model(tokens), held(tokens)), 0);
    EXPECT_EQ(largest_difference(model(flat, sequences), held(flat, sequences)), 0);
    EXPECT_EQ(model.loss(tokens, tokens).item(), held.loss(tokens, tokens).item());
    EXPECT_EQ(model.loss(flat, flat, sequences).item(), held.loss(flat, flat, sequences).item());
    EXPECT_EQ(model.longest(), 16);
    EXPECT_EQ(model.vocabulary(), 19);
    EXPECT_EQ(model.dtype(), DType::f64);
    EXPECT_EQ(model.device(), kCpu);
    const std::vector<int64_t> prompt{3, 1, 4};
    const GenerateOptions options{.most_tokens = 6, .sampling = {.temperature = 0}};
    EXPECT_EQ(generate(model, prompt, options), generate(held, prompt, options));
  });
}

TEST(LanguageModel, NamesItsPartsAsTheModelInIt) {
  for_either([](const auto& held) {
    LanguageModel model = held;
    EXPECT_EQ(names_of(nn::parameters(model)), names_of(nn::parameters(held)));
    nn::to(model, DType::f32);  // reaches the configuration, too
    EXPECT_EQ(model.dtype(), DType::f32);
  });
}

TEST(LanguageModel, ItsReferencesReachTheModel) {
  for_either([](auto held) {
    using Model = decltype(held);
    LanguageModel model = held;
    Model* const own = model.template get_if<Model>();
    ASSERT_NE(own, nullptr);
    const NoTape no_tape;
    const Tensor tokens = tokens_of({3, 1, 4, 1, 5}, {5});
    const auto sequences = nn::Sequences::uniform(1, 5);
    for (const LanguageRef ref : {LanguageRef(model), LanguageRef(*own)}) {
      EXPECT_EQ(ref.visit([](auto& seen) { return static_cast<void*>(&seen); }), own);
      EXPECT_EQ(ref.blocks(), 2);
      EXPECT_EQ(ref.dtype(), DType::f64);
      EXPECT_EQ(ref.device(), kCpu);
      EXPECT_EQ(std::get<decltype(own->config)>(ref.config()).vocabulary, 19);
      const nn::AttentionPass pass = ref.begin(tokens, sequences);
      Residual x = ref.embed(tokens, pass);
      for (int64_t i = 0; i < ref.blocks(); ++i) x = ref.block(i, x, pass);
      EXPECT_EQ(largest_difference(own->finish(x), held(tokens, sequences)), 0);
    }
  });
}

}  // namespace
}  // namespace tessera::models
