#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <set>

#include "nn/observe.h"
#include "ops/matmul/matmul.h"
#include "ops/pointwise/pointwise.h"
#include "tests/errors.h"
#include "tests/models/compressed.h"
#include "tests/models/small_models.h"

/// What holds for the linear layers of every model: none of them can be left out by a form, an observer or
/// the stages of a pass.

namespace tessera::models {
namespace {

/// Linear layers that a model of two blocks has, counted by hand.
size_t number_of_layers(const Gpt&) {
  return 2 * 4 + 1;  // qkv, out, up, down; LM head
}
size_t number_of_layers(const Llama&) {
  return 2 * 4 + 1;
}
size_t number_of_layers(const Bert&) {
  return 2 * 4 + 2;  // head: pooler and classifier, or the transform and the tied decoder
}
size_t number_of_layers(const Tnp&) {
  return 2 + 2 * 5 + 2;  // embedder; q, kv, out, up, down; heads
}

TEST(LayersOfModels, EveryMatrixIsThatOfALinearLayerOrATable) {
  for_each_model([](const std::string& what, auto& model) {
    std::set<std::string> matrices, owners;
    for (const nn::NamedParameter& one : nn::parameters(model))
      if (one.tensor.rank() >= 2) matrices.insert(one.name);
    nn::for_each<nn::Embedding>(model,
                                [&](const std::string& name, auto&) { owners.insert(name + ".weight"); });
    nn::for_each_linear(model, [&](const std::string& name, auto& layer) {
      if (layer.weight.defined()) owners.insert(name + ".weight");
    });
    EXPECT_EQ(matrices, owners) << what;
  });
}

TEST(LayersOfModels, AFormOfAnyLayerChangesTheLoss) {
  for_each_model([](const std::string& what, auto& model) {
    const double dense = small_loss(model).item();
    std::vector<std::string> names;
    nn::for_each_linear(model, [&](const std::string& name, auto& layer) {
      names.push_back(name);
      layer.form = nn::Scaled{1.5};
      EXPECT_GT(std::abs(small_loss(model).item() - dense), 1e-6) << what << ": " << name;
      {
        Tape tape;  // with a tape, other paths may be taken
        const Tensor loss = small_loss(model);
        EXPECT_GT(std::abs(loss.detach().item() - dense), 1e-6) << what << ": " << name;
        tape.backward(loss);
      }
      nn::zero_grad(model);
      layer.form = nn::Dense{};
      EXPECT_EQ(small_loss(model).item(), dense) << what << ": " << name;
    });
    EXPECT_EQ(names.size(), number_of_layers(model)) << what;
  });
}

TEST(LayersOfModels, AFormOfAnyLayerChangesTheLossInBf16) {
  // On a GPU all fused kernels can run in bf16. One that ignored the form would give the dense model's bits.
  for_each_model(
      []<class Model>(const std::string& what, Model& model) {
        // The squared error is one number in bf16, too few bits to differ for sure; its layers are
        // classify's.
        if constexpr (std::is_same_v<Model, Bert>)
          if (model.config.head == BertHead::regress) return;
        const auto losses = [&] {
          Tape tape;
          const Tensor recorded = small_loss(model);
          const NoTape no_tape;
          return std::pair(recorded.detach().item(), small_loss(model).item());
        };
        const auto dense = losses();
        nn::for_each_linear(model, [&](const std::string& name, auto& layer) {
          layer.form = nn::Scaled{1.5};
          const auto scaled = losses();
          EXPECT_NE(scaled.first, dense.first) << what << ": " << name;
          EXPECT_NE(scaled.second, dense.second) << what << ": " << name;
          layer.form = nn::Dense{};
          EXPECT_EQ(losses(), dense) << what << ": " << name;
        });
      },
      DType::bf16, Device::best());
}

TEST(LayersOfModels, ACapturedStepFollowsTheForms) {
  if (Device::cuda_count() == 0) GTEST_SKIP() << "skipped: no GPU";
  Rng rng(3);
  GptConfig config = small_gpt();
  config.dtype = DType::bf16;
  Gpt model(config, rng, Device::cuda());
  const Tensor tokens = tokens_of({4, 7, 2, 9, 5, 11, 3, 8}, {2, 4}).to(Device::cuda()),
               targets = tokens_of({7, 2, 9, 5, 11, 3, 8, 1}, {2, 4}).to(Device::cuda());
  Tensor loss = Tensor::empty({}, DType::f32, Device::cuda());
  Captured step(Device::cuda(), [&] { loss.copy_from(model.loss(tokens, targets)); });
  for (nn::Form* const form :
       {&model.blocks[0].attention.qkv.form, &model.blocks[1].mlp.down.form, &model.lm_head.out.form})
    for (const bool scaled : {true, false}) {
      *form = scaled ? nn::Form(nn::Scaled{1.5}) : nn::Form(nn::Dense{});
      const double wanted = model.loss(tokens, targets).item();
      for (int i = 0; i < 3; ++i) {
        step();
        EXPECT_EQ(loss.item(), wanted);
      }
    }
  EXPECT_EQ(step.graphs(), 4u);  // dense, and three others
}

TEST(LayersOfModels, AFormOfAnyLayerChangesAStepOfGeneration) {
  for_each_model([]<class Model>(const std::string& what, Model& model) {
    if constexpr (std::is_same_v<Model, Gpt> || std::is_same_v<Model, Llama>) {
      const auto logits = [&] {
        nn::KvCache cache = model.make_cache(1, 5);
        model.decode(tokens_of({4, 7, 2}, {1, 3}), cache);
        return model.decode(tokens_of({9}, {1, 1}), cache);
      };
      const Tensor dense = logits();
      nn::for_each_linear(model, [&](const std::string& name, auto& layer) {
        layer.form = nn::Scaled{1.5};
        EXPECT_GT(largest_difference(logits(), dense), 1e-6) << what << ": " << name;
        layer.form = nn::Dense{};
      });
    }
  });
}

TEST(LayersOfModels, ThePersistentDecoderSaysWhichLayerPreventsIt) {
  Rng rng(3);
  Llama model(small_llama(), rng, kCpu);
  const nn::KvCache cache = model.make_cache(1, 5);
  EXPECT_NE(model.persistent_lacks(cache).find("the kernel needs"), std::string::npos);  // a GPU
  nn::for_each_linear(
      model.blocks,
      [&](const std::string& name, auto& layer) {
        layer.form = nn::Scaled{1.5};
        EXPECT_EQ(model.persistent_lacks(cache), name + " is scaled");
        EXPECT_STREQ(model.step_variant(cache), "composed");
        layer.form = nn::Dense{};
        const nn::Observe scope(model, {}, "");
        EXPECT_EQ(model.persistent_lacks(cache), "blocks.0.attention.qkv is observed");
      },
      "blocks");
  EXPECT_EQ(model.persistent_lacks(model.make_cache(2, 5)), "the cache holds several texts");
  LlamaConfig config = small_llama();
  config.mlp_bias = true;
  const Llama biased(config, rng, kCpu);
  EXPECT_EQ(biased.persistent_lacks(biased.make_cache(1, 5)), "blocks.0.mlp.up has a bias");
  for (const LlamaFamily family : {LlamaFamily::qwen2, LlamaFamily::qwen3}) {
    const Llama other(small_family(family), rng, kCpu);
    const std::string lacks = other.persistent_lacks(other.make_cache(1, 5));
    EXPECT_NE(lacks.find("the kernel needs"), std::string::npos) << lacks;
  }
  // Asked all the same, it throws that.
  std::vector<nn::DecoderBlock> blocks;
  model.blocks[1].mlp.down.form = nn::Scaled{1.5};
  for (const LlamaBlock& block : model.blocks)
    blocks.push_back({block.norm1, block.attention, block.norm2, block.mlp, block.dropout});
  const nn::DecoderLayers layers(blocks, cache, "blocks");
  EXPECT_EQ(message_of([&] {
              layers(Tensor::zeros({1, 12}, DType::f64, kCpu), cache.rope_table);
            }),
            "decoder_layers: cannot run these blocks as one kernel: blocks.1.mlp.down is scaled; run the "
            "blocks one after the other");
}

TEST(LayersOfModels, ThePersistentDecoderTakesCompressedLayersAllOrNone) {
  Rng rng(3);
  LlamaConfig config = small_llama();
  config.dtype = DType::f32;
  Llama model(config, rng, kCpu);
  const nn::KvCache cache = model.make_cache(1, 5);
  const auto lacks = [&] { return model.persistent_lacks(cache); };
  nn::Linear &down = model.blocks[1].mlp.down, &qkv = model.blocks[0].attention.qkv,
             &up = model.blocks[1].mlp.up;
  compress(down, {down.out}, ops::SparseFormat::sell_delta4);
  EXPECT_EQ(lacks(), "blocks.1.mlp.down is compressed");
  compress(qkv, {qkv.out}, ops::SparseFormat::sell_delta4);
  EXPECT_EQ(lacks(), "blocks.0.attention.out is dense");
  compress_blocks(model, ops::SparseFormat::sell_delta4);
  EXPECT_EQ(lacks(), "the kernel needs a GPU of compute capability 9.0");
  ops::Gate& gate = std::get<nn::Compressed>(up.form).parts[1].gate;
  gate = {.kind = ops::Gate::Kind::threshold, .threshold = 0.1};
  EXPECT_EQ(lacks(), "blocks.1.mlp.up is gated");
  gate = {};
  std::get<nn::Compressed>(up.form).parts.resize(1);
  EXPECT_EQ(lacks(), "blocks.1.mlp.up is not compressed as gate and up");
}

TEST(LayersOfModels, AnObserverSeesWhatMakesEveryWeightGradient) {
  for_each_model([](const std::string& what, auto& model) {
    const auto gradients = [&](Tensor& loss) {
      nn::zero_grad(model);
      Tape tape;
      loss = small_loss(model);
      tape.backward(loss);
      std::map<std::string, Tensor> all;
      for (const nn::NamedParameter& one : nn::parameters(model)) all[one.name] = grad(one.tensor).clone();
      return all;
    };
    Tensor plain_loss, loss;
    const auto plain = gradients(plain_loss);
    std::map<std::string, Tensor> inputs, output_gradients;
    const nn::Observe scope(
        model, {.forward =
                    [&](const nn::LinearCall& call) {
                      EXPECT_TRUE(inputs.emplace(call.name, call.input.clone()).second) << call.name;
                    },
                .backward =
                    [&](const nn::LinearCall& call, const Tensor& dy) {
                      EXPECT_TRUE(output_gradients.emplace(call.name, dy.clone()).second) << call.name;
                    }});
    const auto observed = gradients(loss);
    EXPECT_NEAR(loss.item(), plain_loss.item(), 1e-13) << what;
    for (const auto& [name, gradient] : plain)
      EXPECT_LT(largest_difference(gradient, observed.at(name)), 1e-12) << what << ": " << name;
    nn::for_each_linear(model, [&]<class Layer>(const std::string& name, Layer& layer) {
      ASSERT_TRUE(inputs.contains(name) && output_gradients.contains(name)) << what << ": " << name;
      if (!layer.weight.defined()) return;  // tied: the gradient is that of the table as well
      const Tensor x = inputs[name], dy = output_gradients[name];
      const auto rows = [](const Tensor& t) { return t.packed().reshape_with({-1, t.size(-1)}); };
      if constexpr (std::is_same_v<Layer, nn::Linear>) {
        EXPECT_LT(largest_difference(grad(layer.weight), ops::matmul(rows(dy), rows(x), true)), 1e-12)
            << what << ": " << name;
      } else {
        const int groups_at = dy.rank() - 2;
        for (int64_t k = 0; k < layer.weight.size(0); ++k) {
          const Tensor in = layer.shared ? x : x.select(groups_at, k);
          EXPECT_LT(largest_difference(grad(layer.weight).select(0, k),
                                       ops::matmul(rows(dy.select(groups_at, k)), rows(in), true)),
                    1e-12)
              << what << ": " << name;
        }
      }
    });
  });
}

// ---- stages ----

struct Stages {
  Tensor output, loss;
};
template <class Model>
Stages by_stages(const Model& model) {
  if constexpr (std::is_same_v<Model, Tnp>) {
    const TnpBatch batch = small_tnp_batch();
    Tensor x = model.embed(batch.xc, batch.yc, batch.xt);
    for (int64_t i = 0; i < model.config.layers; ++i) x = model.block(i, x, batch.xc.size(1));
    return {model.finish(x), model.finish(x, batch.yt)};
  } else if constexpr (std::is_same_v<Model, Bert>) {
    const BertBatch batch = small_bert_batch();
    const nn::AttentionPass pass = model.begin(batch);
    Tensor x = model.embed(batch);
    for (int64_t i = 0; i < model.config.layers; ++i) x = model.block(i, x, pass);
    return {model.finish(x), model.finish(x, small_bert_targets(model))};
  } else {
    const nn::AttentionPass pass = model.begin(small_tokens(), kSmallSequences);
    Residual x = model.embed(small_tokens(), pass);
    for (int64_t i = 0; i < model.config.layers; ++i) x = model.block(i, x, pass);
    return {model.finish(x), model.finish(x, small_targets())};
  }
}
template <class Model>
Tensor output_of(const Model& model) {
  if constexpr (std::is_same_v<Model, Tnp>) {
    const TnpBatch batch = small_tnp_batch();
    return model(batch.xc, batch.yc, batch.xt);
  } else if constexpr (std::is_same_v<Model, Bert>) {
    return model(small_bert_batch());
  } else {
    return model(small_tokens(), kSmallSequences);
  }
}

TEST(Stages, ComposedGiveTheOutputAndTheLoss) {
  for_each_model([](const std::string& what, auto& model) {
    const Stages stages = by_stages(model);
    EXPECT_EQ(largest_difference(stages.output, output_of(model)), 0) << what;
    EXPECT_EQ(stages.loss.item(), small_loss(model).item()) << what;
  });
}

TEST(Stages, LetABlockBeObservedWithTheInputsOfItAlone) {
  // Block by block, from inputs that the block before returned: as calibration needs them.
  Rng rng(3);
  const Llama model(small_llama(), rng, kCpu);
  using Sums = std::map<std::string, Tensor>;
  const auto adds_to = [](Sums& sums) {
    return nn::Observer{.forward = [&sums](const nn::LinearCall& call) {
      const Tensor sum = ops::matmul(call.input, call.input, true);
      Tensor& all = sums[call.name];
      all = all.defined() ? ops::add(all, sum) : sum;
    }};
  };
  Sums whole, by_block;
  const std::vector<Tensor> texts{small_tokens(), tokens_of({1, 2, 3, 4, 5, 6, 7}, {7})};
  {
    const nn::Observe scope(model.blocks, adds_to(whole), "blocks");
    for (const Tensor& text : texts) model(text, kSmallSequences);
  }
  std::vector<Residual> streams;
  const nn::AttentionPass pass = model.begin(texts[0], kSmallSequences);
  for (const Tensor& text : texts) streams.push_back(model.embed(text, pass));
  for (int64_t i = 0; i < model.config.layers; ++i) {
    const nn::Observe scope(model.blocks[size_t(i)], adds_to(by_block), "blocks." + std::to_string(i));
    for (Residual& stream : streams) stream = model.block(i, stream, pass);
  }
  ASSERT_EQ(whole.size(), 8u);
  ASSERT_EQ(by_block.size(), 8u);
  for (const auto& [name, sum] : whole) EXPECT_EQ(largest_difference(sum, by_block[name]), 0) << name;
}

}  // namespace
}  // namespace tessera::models
