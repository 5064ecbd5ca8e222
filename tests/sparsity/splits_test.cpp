#include <gtest/gtest.h>

#include "models/generate.h"
#include "pretrained/load.h"
#include "sparsity/chain.h"
#include "sparsity/modules.h"
#include "sparsity/sparsify.h"
#include "tests/io/files.h"
#include "tests/sparsity/small.h"

// Splits of a total sparsity: which there are, what they cost, and which are worth having.

namespace tessera::sparsity {
namespace {

using io::test::TemporaryFolder;
using io::test::throws;
using namespace test;

TEST(Splits, AreThoseOfEachTotalAboveTheWeights) {
  SweepOptions options{.totals = {0.5, 0.3}, .weights = {0.4, 0, 0.3}};
  const std::vector<Split> splits = splits_of(options);
  std::vector<std::string> names;
  for (const Split& split : splits) {
    names.push_back(std::to_string(int(split.total * 10 + 0.5)) + "/" +
                    std::to_string(int(split.weights * 10 + 0.5)) + " " + ops::name_of(split.format));
    EXPECT_NEAR((1 - split.weights) * (1 - split.activations), 1 - split.total, 1e-12);
  }
  EXPECT_EQ(names,
            (std::vector<std::string>{"3/0 dense-columns", "5/0 dense-columns", "3/3 tiled-cbc",
                                      "3/3 tca-bme", "3/3 sell-delta4", "5/3 tiled-cbc", "5/4 tiled-cbc",
                                      "5/5 tiled-cbc", "5/5 tca-bme", "5/5 sell-delta4"}));
  options.weights_alone = false;
  EXPECT_EQ(splits_of(options).size(), 4u);
  options.weights = {0.6};
  EXPECT_TRUE(throws([&] { splits_of(options); }, "no weight sparsity is below a total one"));
  options.weights = {-0.1};
  EXPECT_TRUE(throws([&] { splits_of(options); }, "-0.1"));
  options.totals = {1};
  EXPECT_TRUE(throws([&] { splits_of(options); }, "less than 1"));
}

TEST(Splits, TheFrontHasNoneThatAnotherBeats) {
  const auto one = [](double ms, double uniform, std::optional<double> greedy) {
    return SplitResult{.uniform_perplexity = uniform, .greedy_perplexity = greedy, .tpot_ms = ms};
  };
  const std::vector<SplitResult> front = pareto_front(
      {one(3, 10, {}), one(1, 30, 20), one(2, 25, {}), one(2, 15, 18), one(4, 10, {}), one(5, 12, 9)});
  ASSERT_EQ(front.size(), 4u);
  EXPECT_EQ(front[0].perplexity(), 20);
  EXPECT_TRUE(front[0].is_greedy());
  EXPECT_EQ(front[1].perplexity(), 15);
  EXPECT_FALSE(front[1].is_greedy());
  EXPECT_EQ(front[2].tpot_ms, 3);
  EXPECT_EQ(front[3].perplexity(), 9);
}

TEST(Splits, UsualWeightsAreSpdpsOperatingPoints) {
  EXPECT_DOUBLE_EQ(usual_weights(0.5), 0.2);
  EXPECT_NEAR(usual_weights(0.3), 0.05, 1e-12);
  EXPECT_NEAR(usual_weights(0.8), 0.45, 1e-12);
  EXPECT_NEAR(usual_weights(0.525), 0.225, 1e-12);
  EXPECT_NEAR(usual_weights(0.05), 0.025, 1e-12);
  for (double total = 0.01; total < 1; total += 0.01) EXPECT_LT(usual_weights(total), total);
}

TEST(Splits, LayersKeepTheirWeightsInEveryFormat) {
  SmallLlama small;
  const Samples samples = small_samples();
  prune(small.model, samples, {.score = Score::magnitude, .sparsity = 0.4});
  std::map<std::string, std::vector<float>> dense;
  for (const auto& module : block_modules(small.model))
    dense[module.name] = weight_of(module).clone().to_vector<float>();
  const LayerBytes before = bytes_of_layers(small.model);
  EXPECT_EQ(before.bytes, before.dense_bytes);
  EXPECT_EQ(before.weight_sparsity, 0);
  for (const ops::SparseFormat format : {ops::SparseFormat::tca_bme, ops::SparseFormat::sell_delta4,
                                         ops::SparseFormat::dense_columns, ops::SparseFormat::tiled_cbc}) {
    compress_layers(small.model, format);
    std::map<nn::Linear*, size_t> next;
    for (const auto& module : block_modules(small.model)) {
      const auto& part = std::get<nn::Compressed>(module.layer->form).parts.at(next[module.layer]++);
      EXPECT_EQ(part.weight.format, format);
      EXPECT_EQ(ops::to_dense(part.weight).clone().to_vector<float>(), dense.at(module.name)) << module.name;
    }
    const LayerBytes bytes = bytes_of_layers(small.model);
    EXPECT_EQ(bytes.dense_bytes, before.dense_bytes);
    EXPECT_NEAR(bytes.weight_sparsity, format == ops::SparseFormat::dense_columns ? 0 : 0.4, 0.01);
  }
  const DecodeTimes times =
      time_generation(small.model, std::vector<int64_t>{1, 2, 3}, {.new_tokens = 4, .repeats = 3});
  EXPECT_EQ(times.ttft_ms.size(), 3u);
  EXPECT_EQ(times.tpot_ms.size(), 3u);
  EXPECT_EQ(median_of({4, 1, 3, 2}), 2);
  const auto layers = time_layers(small.model, std::vector<int64_t>{1, 2, 3}, 2);
  ASSERT_EQ(layers.size(), 9u);  // with the LM head
  EXPECT_EQ(layers[0].first, "blocks.0.attention.qkv");
  EXPECT_TRUE(
      throws([&] { time_generation(small.model, std::vector<int64_t>(16, 1), {}); }, "the model takes 16"));
}

TEST(Splits, SparsifyWritesWhatLoadRuns) {
  const TemporaryFolder folder;
  SmallLlama small;
  pretrained::save(small.model, folder / "m");
  const std::vector<int64_t> text = small_text(400);
  SparsifyOptions options{.total = 0.5, .weights = 0.2};
  options.how.model = folder / "m";
  options.how.calibration = std::span(text).first(200), options.how.evaluation = std::span(text).subspan(200);
  options.how.samples = {.count = 4, .length = 12};
  options.how.window = 12, options.how.prompt = 4;
  options.how.timing = {.new_tokens = 3, .repeats = 1, .warmups = 0};
  options.how.gates = {.step = 0.4, .most = 0.6};
  options.how.device = kCpu;
  options.sample_tokens = 5;
  const Sparsified done = sparsify(options, folder / "s");
  EXPECT_EQ(done.text.size(), 5u);
  EXPECT_TRUE(done.greedy);
  EXPECT_EQ(done.layers.size(), 14u);
  Rng rng(1);
  SparseLanguageModel loaded = load(folder / "s", rng, kCpu, {.activation_sparsity = 0.375});
  EXPECT_EQ(models::generate(std::get<models::Llama>(loaded.model), done.prompt,
                             {.most_tokens = 5, .sampling = {.temperature = 0}}),
            done.text);
  EXPECT_TRUE(throws([&] { sparsify(options, folder / "s"); }, "has weights"));
  options.format = ops::SparseFormat::tca_bme;
  EXPECT_TRUE(throws([&] { sparsify(options, folder / "t"); }, "gates save nothing"));
  options.most_perplexity = 1;  // of this format there is no such split
  EXPECT_TRUE(throws([&] { sparsify(options, folder / "t"); }, "no split keeps the perplexity"));
  EXPECT_FALSE(std::filesystem::exists(folder / "t"));
}

}  // namespace
}  // namespace tessera::sparsity
