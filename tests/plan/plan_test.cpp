#include "plan/plan.h"

#include <gtest/gtest.h>

#include "autograd/tape.h"
#include "comm/dry.h"
#include "models/bert.h"
#include "runtime/rng.h"
#include "tests/models/small_models.h"

namespace tessera::plan {
namespace {

TEST(LanguagePlan, CountsTheParametersOfTheModel) {
  Rng rng(1);
  for (const bool tied : {true, false}) {
    models::GptConfig gpt = models::small_gpt();
    gpt.tied = tied;
    EXPECT_EQ(count_parameters(gpt), nn::count_parameters(models::Gpt(gpt, rng, Device::cpu())));
    models::LlamaConfig llama = models::small_llama();
    llama.tied = tied, llama.attention_bias = tied, llama.gated = tied;
    EXPECT_EQ(count_parameters(llama), nn::count_parameters(models::Llama(llama, rng, Device::cpu())));
    llama.attention_bias = false, llama.gated = true;
    for (const auto family : {models::LlamaFamily::mistral, models::LlamaFamily::qwen2,
                              models::LlamaFamily::qwen3, models::LlamaFamily::phi3}) {
      llama.family = family;
      EXPECT_EQ(count_parameters(llama), nn::count_parameters(models::Llama(llama, rng, Device::cpu())));
    }
  }
}

TEST(LanguagePlan, CountsTheWorkOfAToken) {
  // 6 FLOPs per parameter and token (Kaplan et al., arXiv:2001.08361, section 2.1) without the tables, and
  // the attention.
  LanguageConfig config = models::GptConfig{};
  const Flops flops = count_flops(config, 2, 1024);
  const double matrices = 12.0 * 12 * 768 * 768;
  EXPECT_DOUBLE_EQ(flops.gemms, 2.0 * 2048 * matrices);
  EXPECT_DOUBLE_EQ(flops.heads, 2.0 * 2048 * 768 * 50257);
  EXPECT_DOUBLE_EQ(flops.attention, 12.0 * 4 * 2 * 1024 * 1024 * 768 / 2);
}

TEST(TnpPlan, CountsTheParametersOfTheModel) {
  Rng rng(1);
  for (const bool pre_norm : {false, true}) {
    const models::TnpConfig config = models::small_tnp(pre_norm);
    EXPECT_EQ(count_parameters(config), nn::count_parameters(models::Tnp(config, rng, Device::cpu())));
  }
}

TEST(TnpPlan, CountsTheWorkOfAStep) {
  const models::TnpConfig config{
      .features = 1, .d_model = 4, .d_ff = 8, .heads = 1, .layers = 2, .components = 3, .embed_hidden = 16};
  // 2 tasks of 5 context and 7 target points: 24 tokens, 10 of them in the context. The last block has rows
  // for the 14 targets only: 38 rows of both blocks.
  const Flops flops = count_flops(config, 2, 5, 7);
  EXPECT_DOUBLE_EQ(flops.gemms, 2.0 * (24 * 16 * (2 + 4) + 38 * 4 * (4 + 4 + 8 + 8) + 2 * 10 * 4 * 8));
  EXPECT_DOUBLE_EQ(flops.attention, 38.0 * 4 * 5 * 4);
  EXPECT_DOUBLE_EQ(flops.heads, 2.0 * 14 * 3 * 8 * (4 + 3));
  EXPECT_DOUBLE_EQ(flops.step(), 3 * (flops.gemms + flops.heads) + 3.5 * flops.attention);
  EXPECT_DOUBLE_EQ(flops.step(true) - flops.step(), flops.gemms + flops.attention);
}

using By = nn::AttentionSplit::By;

/// Bytes that rank 0 of so many sends for attention in a step, as a dry run counts them.
double counted_bytes(const models::TnpConfig& config, int ranks, By by) {
  Rng rng(1);
  const models::Tnp model(config, rng, Device::cpu());
  const auto points = [](int64_t count, int64_t width) {
    return Tensor::full({2, count, width}, 0.5, DType::f32, Device::cpu());
  };
  const comm::DryRun run(0, ranks);
  const auto split = std::make_shared<const models::TnpSplit>(run.communicator(), by, 8, 12);
  nn::parameters(model);
  Tape tape;
  tape.backward(
      model.loss(models::part_of({points(8, 1), points(8, 1), points(12, 1), points(12, 1)}, split)));
  double bytes = 0;
  for (const auto& [name, counts] : run.counts()) bytes += double(counts.bytes);
  return bytes;
}

TEST(TnpPlan, CountsWhatRanksOfATaskSend) {
  models::TnpConfig config{.features = 1,
                           .d_model = 16,
                           .d_ff = 8,
                           .heads = 4,
                           .layers = 3,
                           .components = 2,
                           .embed_hidden = 4,
                           .dtype = DType::f32};
  for (const int64_t checkpoint_every : {0, 1})
    for (const int ranks : {2, 4}) {
      config.checkpoint_every = checkpoint_every;
      EXPECT_DOUBLE_EQ(count_attention_bytes(config, 2, 8, 12, {ranks, By::rows}),
                       counted_bytes(config, ranks, By::rows));
      EXPECT_DOUBLE_EQ(count_attention_bytes(config, 2, 8, 12, {ranks, By::heads}),
                       counted_bytes(config, ranks, By::heads));
    }
  // By hand, for two ranks: in 3 blocks the keys and values of 4 points of 2 tasks to the other rank, and as
  // many gradients to it.
  config.checkpoint_every = 0;
  EXPECT_DOUBLE_EQ(count_attention_bytes(config, 2, 8, 12, {2, By::rows}), 3 * 2.0 * (2 * 4) * (2 * 16) * 4);
}

TEST(TnpPlan, CountsTheMemoryOfAShare) {
  const models::TnpConfig config;
  const Memory one = count_memory(config, 2, 1000, 100),
               same = count_memory(config, 2, 1000, 100, {1, By::heads});
  EXPECT_EQ(same.total(), one.total());
  const Memory rows = count_memory(config, 2, 1000, 100, {2, By::rows}),
               heads = count_memory(config, 2, 1000, 100, {2, By::heads});
  EXPECT_EQ(rows.parameters, one.parameters);
  EXPECT_EQ(rows.optimizer, one.optimizer);
  // All but the keys and values is halved: those of 2000 points, 2 x 512 elements in 12 blocks.
  const double known = 12 * 2000.0 * 2 * 512 * 4;
  EXPECT_NEAR(rows.saved, (one.saved - known) / 2 + known, 1e-9 * one.saved);
  EXPECT_LT(heads.saved, rows.saved);
  EXPECT_GT(heads.saved, one.saved / 2);
  // The larger of two shares.
  EXPECT_DOUBLE_EQ(count_memory(config, 2, 1001, 100, {2, By::rows}).saved - known * 1001 / 1000,
                   count_memory(config, 2, 1002, 100, {2, By::rows}).saved - known * 1002 / 1000);
}

TEST(GenerationPlan, CountsAPromptAndAToken) {
  const models::LlamaConfig config{.vocabulary = 512,
                                   .d_model = 128,
                                   .d_ff = 344,
                                   .heads = 4,
                                   .kv_heads = 2,
                                   .layers = 2,
                                   .dtype = DType::bf16};
  const double weights = 1e6;  // bytes: half as many elements
  const Generation prompt = prefill(config, weights, 2, 10), token = decode(config, weights, 2, 12);
  EXPECT_DOUBLE_EQ(prompt.flops, 2 * (2 * 5e5 * 10 + 4.0 * (10 * 10 / 2) * 128 * 2));  // causal: half
  EXPECT_DOUBLE_EQ(prompt.bytes, weights);
  EXPECT_DOUBLE_EQ(token.flops, 2 * (2 * 5e5 + 4.0 * 12 * 128 * 2));
  EXPECT_DOUBLE_EQ(token.bytes, weights + 2 * 12 * (2.0 * 64 * 2 * 2));  // K and V, 64 wide, 2 layers, bf16
}
TEST(BertPlan, CountsTheParametersOfTheModel) {
  Rng rng(1);
  for (const auto head : {models::BertHead::none, models::BertHead::classify, models::BertHead::regress,
                          models::BertHead::masked_lm}) {
    const models::BertConfig config = models::small_bert(head);
    models::Bert model(config, rng, Device::cpu());
    EXPECT_EQ(count_parameters(config), nn::count_parameters(model));
    EXPECT_EQ(count_trained(config, {}), nn::count_parameters(model));
    if (!model.classifier) continue;
    for (const auto trained : {BertStep::Trained::biases, BertStep::Trained::head}) {
      models::Bert part(config, rng, Device::cpu());
      nn::freeze(part, [&](const std::string& name) {
        return !name.starts_with("classifier.") &&
               !(trained == BertStep::Trained::biases && name.ends_with(".bias"));
      });
      int64_t count = 0;
      for (const auto& [name, tensor] : nn::parameters(part))
        if (requires_grad(tensor)) count += tensor.count();
      EXPECT_EQ(count_trained(config, {.trained = trained}), count);
    }
  }
}

TEST(BertPlan, CountsTheFlopsOfASlicedStep) {
  models::BertConfig config;  // 2 blocks of d 8 and d_ff 16; 4 sequences of 10 tokens, all of which are read
  config.vocabulary = 61, config.d_model = 8, config.d_ff = 16, config.heads = 1, config.layers = 2;
  BertStep step{.batch = 4, .length = 10};
  const double attention = 2 * 40 * 4 * 10 * 8, projections = 2 * 2.0 * 40 * 4 * 64,
               mlps = 2 * 2.0 * 40 * 2 * 128;
  EXPECT_DOUBLE_EQ(step_flops(config, step), 3.5 * attention + 3 * (projections + mlps));
  EXPECT_DOUBLE_EQ(step_flops(config, step), step_flops(config, 40, 10));
  step.sliced.assign(2, {.up = true, .down = true});
  const auto sliced = [&](ops::WeightGrad weight_grad, double share) {
    step.slice = nn::SlicedBackward{.share = share, .weight_grad = weight_grad};
    return step_flops(config, step) - 3.5 * attention - 3 * projections;
  };
  EXPECT_DOUBLE_EQ(sliced(ops::WeightGrad::slice, 0.25), 1.5 * mlps);
  EXPECT_DOUBLE_EQ(sliced(ops::WeightGrad::none, 0.25), 1.25 * mlps);
  EXPECT_DOUBLE_EQ(sliced(ops::WeightGrad::full, 0.25), (1.5 + 0.75 / 2) * mlps);
  EXPECT_DOUBLE_EQ(sliced(ops::WeightGrad::slice, 1), 3 * mlps);
  step.slice.reset();
  step.trained = BertStep::Trained::biases;  // no gradients of weights
  EXPECT_DOUBLE_EQ(step_flops(config, step), 3.5 * attention + 2 * (projections + mlps));
}

TEST(BertPlan, CountsWhatSlicedLayersKeep) {
  models::BertConfig config;
  config.head = models::BertHead::classify;
  BertStep step{.batch = 32, .length = 128};
  const double dense = count_memory(config, step).saved;
  step.sliced.assign(12, {.up = true, .down = true});
  step.slice = nn::SlicedBackward{.rows = ops::SelectMode::random, .share = 0.1, .rng = Rng(0)};
  // Of 11 blocks x and h of 409 rows, of the last one those of 3 of 32 texts.
  const double kept = (11 * 409.0 + 3) * (768 + 3072) * 4;
  EXPECT_DOUBLE_EQ(sliced_bytes(config, step), kept);
  const double unsliced = (11 * 4096.0 + 32) * (768 + 2 * 3072) * 4;
  EXPECT_NEAR(dense - count_memory(config, step).saved, unsliced - kept, 1e-9 * dense);
  EXPECT_LE(kept, 0.15 * unsliced);
}

TEST(BertPlan, CountsTheMeanOverTheBranchesThatAreDropped) {
  models::BertConfig config;
  config.head = models::BertHead::classify;
  BertStep step{.batch = 16, .length = 512};
  const Memory dense = count_memory(config, step);
  const double flops = step_flops(config, step), forward = count_flops(config, step).forward();
  double saved = dense.saved, backward = flops - forward;
  for (const double drop : {0.15, 0.5, 0.875, 1.0}) {
    step.drop = drop;
    const Memory memory = count_memory(config, step);
    EXPECT_LT(memory.saved, saved);
    saved = memory.saved;
    // At least that share of the branches' FLOPs goes, and with it of the backward pass.
    const double now = step_flops(config, step) - forward;
    EXPECT_LT(now, backward);
    EXPECT_LE(now, (1 - drop) * (flops - forward) * 1.02 + 2.001 * count_flops(config, step).heads);
    backward = now;
  }
  // Nothing but the embedding's and the norms' sums, 25 of [tokens, d], of the last block's two one row per
  // text.
  EXPECT_NEAR(saved / (16 * 512 * 768 * 4.0), 23, 0.05 * 23);
}

TEST(BertPlan, StepFlopsCountWhatTheStepMultiplies) {
  models::BertConfig config;  // BERT-base, 32 sequences of 128 tokens
  config.head = models::BertHead::none;
  const double whole = 12 * 4096.0 * (3 * 2 * 12 * 768 * 768 + 3.5 * 4 * 128 * 768);
  EXPECT_DOUBLE_EQ(step_flops(config, 4096, 128), whole);
  config.head = models::BertHead::classify;  // 9 of the last block's 12 GEMMs for 32 rows only
  EXPECT_DOUBLE_EQ(step_flops(config, 4096, 128), whole - 3 * 4064.0 * 2 * 9 * 768 * 768);
}

}  // namespace
}  // namespace tessera::plan
