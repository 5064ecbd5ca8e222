#include <gtest/gtest.h>

#include "models/generate.h"
#include "models/gpt.h"
#include "models/llama.h"

namespace tessera::models {
namespace {

GptConfig small_gpt(DType dtype) {
  return {.vocabulary = 97,
          .positions = 64,
          .d_model = 64,
          .d_ff = 96,
          .heads = 4,
          .layers = 2,
          .init_deviation = 0.3,
          .dtype = dtype};
}
LlamaConfig small_llama(DType dtype) {
  return {.vocabulary = 97,
          .positions = 64,
          .d_model = 64,
          .d_ff = 104,
          .heads = 4,
          .kv_heads = 2,
          .layers = 2,
          .rope = {.scaling = ops::RopeScaling::llama3, .factor = 2, .trained_length = 16},
          .init_deviation = 0.3,
          .dtype = dtype};
}

const Generator::Texts kPrompts{
    {4, 7, 2, 9, 11, 3}, {5}, {17, 20, 33, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 1}};

/// What the graph repeats are the eager step's kernels: the tokens must be the same, not merely alike.
template <class Model>
void graph_equals_eager(const Model& model) {
  Generator generator(model, 3, 50);
  for (const Sampling& sampling : {Sampling{.temperature = 0}, Sampling{.temperature = 2, .top_p = 0.95}}) {
    GenerateOptions options{.most_tokens = 24, .sampling = sampling, .seed = 9, .graph = false};
    const auto eager = generator(kPrompts, options);
    EXPECT_FALSE(generator.is_graph());
    options.graph = true;
    EXPECT_EQ(generator(kPrompts, options), eager);
    EXPECT_TRUE(generator.is_graph());
    EXPECT_EQ(generator(kPrompts, options), eager);  // replays from the first step on
    options.seed = 10;
    if (sampling.temperature > 0) EXPECT_NE(generator(kPrompts, options), eager);
  }
}

TEST(GenerateOnGpu, AGraphGivesTheTokensOfTheEagerStep) {
  if (Device::cuda_count() == 0) GTEST_SKIP() << "skipped: no GPU";
  Rng rng(3);
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
    graph_equals_eager(Gpt(small_gpt(dtype), rng, Device::cuda()));
    graph_equals_eager(Llama(small_llama(dtype), rng, Device::cuda()));
  }
}

TEST(GenerateOnGpu, F32GivesTheTokensOfTheCpu) {
  if (Device::cuda_count() == 0) GTEST_SKIP() << "skipped: no GPU";
  // Equal weights on both: drawn on the host. Logits differ by rounding alone, 1e-6 of their size; a choice
  // could fall between two only by chance of that order.
  Rng one(3), two(3);
  const Llama cpu(small_llama(DType::f32), one, Device::cpu()),
      gpu(small_llama(DType::f32), two, Device::cuda());
  for (const Sampling& sampling : {Sampling{.temperature = 0}, Sampling{.top_k = 20, .top_p = 0.9}}) {
    const GenerateOptions options{.most_tokens = 24, .sampling = sampling, .seed = 9};
    EXPECT_EQ(Generator(gpu, 3, 50)(kPrompts, options), Generator(cpu, 3, 50)(kPrompts, options));
  }
}

}  // namespace
}  // namespace tessera::models
