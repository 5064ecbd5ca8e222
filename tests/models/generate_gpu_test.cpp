#include <gtest/gtest.h>

#include <cmath>
#include <optional>

#include "models/generate.h"
#include "models/gpt.h"
#include "models/llama.h"
#include "runtime/capture.h"
#include "runtime/tuning.h"

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

/// Logits of `steps` single-token steps after a prompt, as a graph replays them.
std::vector<std::vector<float>> stepped_logits(const Llama& model, int64_t prompt, int64_t steps, int row) {
  std::optional<tuning::ForceRow> force;
  if (row >= 0) force.emplace("decoder_layers", row);
  nn::KvCache cache = model.make_cache(1, prompt + steps);
  std::vector<int64_t> tokens;
  for (int64_t t = 0; t < prompt; ++t) tokens.push_back((7 * t + 3) % model.config.vocabulary);
  model.prefill(Tensor::from(tokens, {prompt}, Device::cuda()), nn::Sequences::uniform(1, prompt), cache);
  const Tensor token = Tensor::from(std::vector<int64_t>{5}, {1, 1}, Device::cuda());
  Tensor logits;
  Captured step(Device::cuda(), [&] { logits = model.step(token, cache); });
  std::vector<std::vector<float>> all;
  for (int64_t i = 0; i < steps; ++i) {
    token.fill(double((11 * i + 1) % model.config.vocabulary));
    step();
    cache.advance(1);
    all.push_back(logits.to(DType::f32).to(Device::cpu()).to_vector<float>());
  }
  EXPECT_TRUE(step.is_graph());
  return all;
}

TEST(GenerateOnGpu, ThePersistentDecoderGivesTheLogitsOfItsOperators) {
  if (Device::cuda_count() == 0) GTEST_SKIP() << "skipped: no GPU";
  if (Device::cuda().card().major < 9) GTEST_SKIP() << "skipped: the kernel needs compute capability 9.0";
  struct Sizes {
    int64_t d, f, heads, kv_heads, head, prompt;
  };
  Rng rng(3);
  // 64 and 128 keys are a round of a block's warps; 600 keys lie in several splits.
  for (const Sizes& sizes :
       {Sizes{64, 104, 4, 2, 64, 60}, Sizes{256, 2200, 8, 1, 128, 600}, Sizes{1536, 4096, 12, 12, 128, 126}})
    for (const DType dtype : {DType::bf16, DType::f16}) {
      LlamaConfig config = small_llama(dtype);
      config.positions = 1024;
      config.d_model = sizes.d, config.d_ff = sizes.f, config.heads = sizes.heads;
      config.kv_heads = sizes.kv_heads, config.head = sizes.head, config.layers = 3;
      config.init_deviation = 1 / std::sqrt(double(sizes.d));
      const Llama model(config, rng, Device::cuda());
      const auto composed = stepped_logits(model, sizes.prompt, 8, 0);
      const auto persistent = stepped_logits(model, sizes.prompt, 8, 1);
      EXPECT_EQ(persistent, stepped_logits(model, sizes.prompt, 8, 1));  // bit for bit
      for (size_t i = 0; i < composed.size(); ++i) {
        double largest = 0, worst = 0;
        for (size_t v = 0; v < composed[i].size(); ++v) {
          largest = std::max(largest, std::abs(double(composed[i][v])));
          worst = std::max(worst, std::abs(double(composed[i][v]) - double(persistent[i][v])));
        }
        // The composed operators round the residual stream, q, k, v, gate and up to the dtype in every layer:
        // some 20 roundings of half an ulp, which add up like a random walk.
        EXPECT_LE(worst, 8 * epsilon(dtype) * largest) << dtype << " d " << sizes.d << " step " << i;
      }
    }
}

}  // namespace
}  // namespace tessera::models
