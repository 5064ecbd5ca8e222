#include <gtest/gtest.h>

#include <cmath>
#include <type_traits>

#include "models/generate.h"
#include "models/gpt.h"
#include "models/llama.h"
#include "nn/init.h"
#include "ops/pointwise/pointwise.h"
#include "ops/random/random.h"
#include "ops/variant.h"
#include "runtime/capture.h"
#include "tests/models/compressed.h"

namespace tessera::models {
namespace {

GptConfig wide_gpt(DType dtype) {
  return {.vocabulary = 97,
          .positions = 64,
          .d_model = 64,
          .d_ff = 96,
          .heads = 4,
          .layers = 2,
          .init_deviation = 0.3,
          .dtype = dtype};
}
LlamaConfig wide_llama(DType dtype) {
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

GptConfig gpt_of_36(DType dtype) {  // heads of no whole packs: padded within attention
  GptConfig config = wide_gpt(dtype);
  config.d_model = 72, config.heads = 2;
  return config;
}
/// A family with what is its own; qwen3 with heads of 36, phi3 with 24 of 32 elements rotated.
LlamaConfig wide_family(LlamaFamily family, DType dtype) {
  LlamaConfig config = wide_llama(dtype);
  config.family = family;
  config.head_dim = family == LlamaFamily::qwen3 ? 36 : 32;
  if (family != LlamaFamily::phi3) return config;
  config.partial_rotary = 0.75;
  config.rope = {.scaling = ops::RopeScaling::longrope, .factor = 2, .trained_length = 64};
  for (int i = 0; i < 12; ++i)
    config.rope.short_factor.push_back(1 + 0.1 * i), config.rope.long_factor.push_back(1.5 + i);
  return config;
}
constexpr LlamaFamily kWideFamilies[] = {LlamaFamily::mistral, LlamaFamily::qwen2, LlamaFamily::qwen3,
                                         LlamaFamily::phi3};

/// The model of that configuration, drawn on the host; biases and norms away from 0 and 1, where they would
/// hide.
template <class Model, class Config>
Model drawn(const Config& config, Rng& rng, Device device) {
  Model model(config, rng, device);
  for (const auto& [name, parameter] : nn::parameters(model)) {
    const Tensor shift = Tensor::empty(parameter.shape(), DType::f32, Device::cpu());
    nn::init::normal(shift, rng, 0, 0.1);
    parameter.detach().copy_from(ops::add(parameter.detach().to(DType::f32), shift.to(parameter.device())));
  }
  return model;
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
    graph_equals_eager(Gpt(wide_gpt(dtype), rng, Device::cuda()));
    graph_equals_eager(Llama(wide_llama(dtype), rng, Device::cuda()));
    graph_equals_eager(drawn<Gpt>(gpt_of_36(dtype), rng, Device::cuda()));
    for (const LlamaFamily family : kWideFamilies)
      graph_equals_eager(drawn<Llama>(wide_family(family, dtype), rng, Device::cuda()));
  }
}

TEST(GenerateOnGpu, F32GivesTheTokensOfTheCpu) {
  if (Device::cuda_count() == 0) GTEST_SKIP() << "skipped: no GPU";
  // Equal weights on both: drawn on the host. Logits differ by rounding alone, 1e-6 of their size; a choice
  // could fall between two only by chance of that order.
  const auto compare = [](const auto& cpu, const auto& gpu) {
    for (const Sampling& sampling : {Sampling{.temperature = 0}, Sampling{.top_k = 20, .top_p = 0.9}}) {
      const GenerateOptions options{.most_tokens = 24, .sampling = sampling, .seed = 9};
      EXPECT_EQ(Generator(gpu, 3, 50)(kPrompts, options), Generator(cpu, 3, 50)(kPrompts, options));
    }
  };
  const auto compare_drawn = [&]<class Model>(std::type_identity<Model>, const auto& config) {
    Rng one(3), two(3);
    compare(drawn<Model>(config, one, Device::cpu()), drawn<Model>(config, two, Device::cuda()));
  };
  Rng one(3), two(3);
  compare(Llama(wide_llama(DType::f32), one, Device::cpu()),
          Llama(wide_llama(DType::f32), two, Device::cuda()));
  compare_drawn(std::type_identity<Gpt>{}, gpt_of_36(DType::f32));
  for (const LlamaFamily family : kWideFamilies)
    compare_drawn(std::type_identity<Llama>{}, wide_family(family, DType::f32));
  // Texts that outgrow longrope's short factors on the way, after 1 and after 5 tokens.
  for (const int64_t length : {20, 24}) {
    LlamaConfig config = wide_family(LlamaFamily::phi3, DType::f32);
    config.rope.trained_length = length;
    compare_drawn(std::type_identity<Llama>{}, config);
  }
}

TEST(ModelsOnGpu, LossAndGradientsAreThoseOfTheCpu) {
  if (Device::cuda_count() == 0) GTEST_SKIP() << "skipped: no GPU";
  const auto run = []<class Model>(std::type_identity<Model>, const auto& config, Device device) {
    Rng rng(3);
    const Model model = drawn<Model>(config, rng, device);
    std::vector<int64_t> tokens;
    for (int64_t t = 0; t < 41; ++t) tokens.push_back((7 * t + 3) % 97);
    const Tensor text = Tensor::from(tokens, {41}, device);
    Tape tape;
    // Two texts of one length, then packed ones of different lengths.
    const Tensor even =
                     model.loss(text.slice(0, 0, 40).reshape({2, 20}), text.slice(0, 1, 41).reshape({2, 20})),
                 packed = model.loss(text.slice(0, 0, 40), text.slice(0, 1, 41), {{27, 13}});
    const Tensor loss = ops::add(even, packed);
    tape.backward(loss);
    std::vector<std::vector<double>> results{{loss.item()}};
    for (const auto& [name, parameter] : nn::parameters(model))
      results.push_back(grad(parameter).template to_vector<double>());
    return results;
  };
  const auto compare = [&]<class Model>(std::type_identity<Model> model, const auto& config,
                                        const std::string& what) {
    const auto cpu = run(model, config, Device::cpu()), gpu = run(model, config, Device::cuda());
    ASSERT_EQ(cpu.size(), gpu.size());
    for (size_t i = 0; i < cpu.size(); ++i) {
      double largest = 0, worst = 0;
      for (size_t at = 0; at < cpu[i].size(); ++at) {
        largest = std::max(largest, std::abs(cpu[i][at]));
        const double off = std::abs(cpu[i][at] - gpu[i][at]);
        worst = off <= worst ? worst : off;  // a NaN stays
      }
      // f32 sums of a few thousand terms in another order; measured on the CPU against transformers 1e-6. A
      // bias of keys has no gradient but rounding.
      EXPECT_LE(worst, 1e-4 * largest + 1e-6) << what << ", tensor " << i << " of " << cpu.size();
    }
  };
  compare(std::type_identity<Gpt>{}, gpt_of_36(DType::f32), "gpt");
  for (const LlamaFamily family : kWideFamilies)
    compare(std::type_identity<Llama>{}, wide_family(family, DType::f32), name_of(family));
}

/// Logits of `steps` single-token steps after a prompt, as a graph replays them.
std::vector<std::vector<float>> stepped_logits(const Llama& model, int64_t prompt, int64_t steps,
                                               const char* variant) {
  const ops::ForceVariant force("decoder_layers", variant);
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
  if (Device::cuda().info().major < 9) GTEST_SKIP() << "skipped: the kernel needs compute capability 9.0";
  struct Sizes {
    int64_t d, f, heads, kv_heads, head, prompt;
  };
  Rng rng(3);
  // 64 and 128 keys are a round of a block's warps; 600 keys lie in several splits.
  for (const Sizes& sizes :
       {Sizes{64, 104, 4, 2, 64, 60}, Sizes{256, 2200, 8, 1, 128, 600}, Sizes{1536, 4096, 12, 12, 128, 126}})
    for (const DType dtype : {DType::bf16, DType::f16}) {
      LlamaConfig config = wide_llama(dtype);
      if (sizes.f == 104) {  // as phi3, which rotates three quarters of a head
        config = wide_family(LlamaFamily::phi3, dtype);
        config.rope = {};
      }
      config.positions = 1024;
      config.d_model = sizes.d, config.d_ff = sizes.f, config.heads = sizes.heads;
      config.kv_heads = sizes.kv_heads, config.head_dim = sizes.head, config.layers = 3;
      config.init_deviation = 1 / std::sqrt(double(sizes.d));
      const Llama model(config, rng, Device::cuda());
      const auto composed = stepped_logits(model, sizes.prompt, 8, "composed");
      const auto persistent = stepped_logits(model, sizes.prompt, 8, "persistent");
      EXPECT_EQ(persistent, stepped_logits(model, sizes.prompt, 8, "persistent"));  // bit for bit
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

/// Zeros a share of the weights of all layers in the blocks.
void prune(Llama& model, double share, Rng& rng) {
  nn::for_each_linear(
      model.blocks,
      [&](const std::string&, nn::Linear& layer) {
        const Tensor chance = Tensor::empty(layer.weight.shape(), DType::f32, Device::cpu());
        ops::fill_uniform(chance, 0, 1, rng);
        std::vector<float> values = layer.weight.detach().to(DType::f32).to(Device::cpu()).to_vector<float>();
        const std::vector<float> drawn = chance.to_vector<float>();
        for (size_t i = 0; i < values.size(); ++i)
          if (drawn[i] < share) values[i] = 0;
        layer.weight.detach().copy_from(Tensor::from(values, layer.weight.shape()).to(layer.weight.dtype()));
      },
      "blocks");
}

TEST(GenerateOnGpu, ThePersistentDecoderOfCompressedLayersGivesTheLogitsOfItsOperators) {
  if (Device::cuda_count() == 0) GTEST_SKIP() << "skipped: no GPU";
  if (Device::cuda().info().major < 9) GTEST_SKIP() << "skipped: the kernel needs compute capability 9.0";
  struct Sizes {
    int64_t d, f, heads, kv_heads, head, prompt;
    double share;
  };
  Rng rng(3);
  for (const Sizes& sizes : {Sizes{64, 104, 4, 2, 64, 60, 0.5}, Sizes{256, 2200, 8, 1, 128, 600, 0.9},
                             Sizes{1536, 4096, 12, 12, 128, 126, 0.6}})
    for (const DType dtype : {DType::bf16, DType::f16}) {
      LlamaConfig config = wide_llama(dtype);
      config.positions = 1024;
      config.rope = {};
      config.d_model = sizes.d, config.d_ff = sizes.f, config.heads = sizes.heads;
      config.kv_heads = sizes.kv_heads, config.head_dim = sizes.head, config.layers = 3;
      config.init_deviation = 1 / std::sqrt(double(sizes.d) * (1 - sizes.share));
      Llama model(config, rng, Device::cuda());
      prune(model, sizes.share, rng);
      const auto dense = stepped_logits(model, sizes.prompt, 8, "persistent");
      compress_blocks(model, ops::SparseFormat::sell_delta4);
      EXPECT_STREQ(model.step_variant(model.make_cache(1, 64)), "persistent");
      const auto composed = stepped_logits(model, sizes.prompt, 8, "composed");
      const auto persistent = stepped_logits(model, sizes.prompt, 8, "persistent");
      EXPECT_EQ(persistent, stepped_logits(model, sizes.prompt, 8, "persistent"));  // bit for bit
      for (size_t i = 0; i < composed.size(); ++i)
        for (const auto& expected : {composed[i], dense[i]}) {
          double largest = 0, worst = 0;
          for (size_t v = 0; v < expected.size(); ++v) {
            largest = std::max(largest, std::abs(double(expected[v])));
            worst = std::max(worst, std::abs(double(expected[v]) - double(persistent[i][v])));
          }
          // As in the test of dense layers.
          EXPECT_LE(worst, 8 * epsilon(dtype) * largest) << dtype << " d " << sizes.d << " step " << i;
        }
    }
}

TEST(GenerateOnGpu, ThePersistentDecoderDeclinesWhatItDoesNotCompute) {
  if (Device::cuda_count() == 0) GTEST_SKIP() << "skipped: no GPU";
  if (Device::cuda().info().major < 9) GTEST_SKIP() << "skipped: the kernel needs compute capability 9.0";
  Rng rng(3);
  for (const LlamaFamily family :
       {LlamaFamily::llama, LlamaFamily::mistral, LlamaFamily::qwen2, LlamaFamily::qwen3, LlamaFamily::phi3})
    for (const bool biases : {false, true}) {
      if (biases && family != LlamaFamily::llama && family != LlamaFamily::qwen3) continue;
      LlamaConfig config = wide_family(family, DType::bf16);
      config.rope = {};
      config.head_dim = 64, config.attention_bias = biases;
      const Llama model = drawn<Llama>(config, rng, Device::cuda());
      // Biases of q, k and v (Qwen2) and norms of q and k (Qwen3) it computes, a bias of the output it does
      // not.
      EXPECT_STREQ(model.step_variant(model.make_cache(1, 64)), biases ? "composed" : "persistent")
          << name_of(family) << " " << biases;
      EXPECT_STREQ(model.step_variant(model.make_cache(2, 64)), "composed");
      // A step gives what the whole text gives, whichever way it runs.
      const std::vector<int64_t> text{4, 7, 2, 9, 11, 3};
      const auto whole =
          model(Tensor::from(text, {1, 6}, Device::cuda())).select(1, 5).to(DType::f32).to_vector<float>();
      nn::KvCache cache = model.make_cache(1, 64);
      model.decode(Tensor::from(text, {1, 6}, Device::cuda()).slice(1, 0, 5), cache);
      const auto step = model.decode(Tensor::from(text, {1, 6}, Device::cuda()).slice(1, 5, 6), cache)
                            .to(DType::f32)
                            .to_vector<float>();
      double largest = 0, worst = 0;
      for (size_t i = 0; i < whole.size(); ++i) {
        largest = std::max(largest, std::abs(double(whole[i])));
        worst = std::max(worst, std::abs(double(whole[i]) - double(step[i])));
      }
      // As above: some 20 roundings of half an ulp that add up like a random walk.
      EXPECT_LE(worst, 8 * epsilon(DType::bf16) * largest) << name_of(family) << " " << biases;
    }
}

TEST(GenerateOnGpu, AFormOfAnyLayerTurnsThePersistentDecoderOff) {
  if (Device::cuda_count() == 0) GTEST_SKIP() << "skipped: no GPU";
  if (Device::cuda().info().major < 9) GTEST_SKIP() << "skipped: the kernel needs compute capability 9.0";
  Rng rng(3);
  LlamaConfig config = wide_llama(DType::bf16);
  config.rope = {}, config.head_dim = 64;
  Llama model = drawn<Llama>(config, rng, Device::cuda());
  const nn::KvCache cache = model.make_cache(1, 64);
  EXPECT_EQ(model.persistent_lacks(cache), "");
  nn::for_each_linear(
      model.blocks,
      [&](const std::string& name, auto& layer) {
        layer.form = nn::Scaled{1.5};
        EXPECT_STREQ(model.step_variant(cache), "composed");
        EXPECT_EQ(model.persistent_lacks(cache), name + " is scaled");
        layer.form = nn::Dense{};
      },
      "blocks");
  EXPECT_STREQ(model.step_variant(cache), "persistent");
}

}  // namespace
}  // namespace tessera::models
