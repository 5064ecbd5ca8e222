#include "sparsity/griffin.h"

#include <gtest/gtest.h>

#include <cmath>

#include "eval/perplexity.h"
#include "nn/observe.h"
#include "pretrained/sparse_model.h"
#include "sparsity/modules.h"
#include "tests/io/files.h"
#include "tests/sparsity/small.h"

// Griffin: neurons chosen by a prompt, against plain loops and against networks with zeros in their place.

namespace tessera::sparsity {
namespace {

using io::test::throws;
using namespace test;

std::vector<int64_t> prompt_of(int64_t tokens, int64_t shift = 0) {
  std::vector<int64_t> text = small_text(tokens + shift);
  return {text.begin() + shift, text.end()};
}

/// The inputs of the second layers of the networks on a text.
template <class Model>
std::vector<std::vector<float>> activations(const Model& model, const std::vector<int64_t>& text) {
  std::vector<std::vector<float>> z;
  const NoTape no_tape;
  const nn::Observe scope(model, {.forward = [&](const nn::LinearCall& call) {
                            if (call.name.ends_with("mlp.down"))
                              z.push_back(call.input.clone().to_vector<float>());
                          }});
  model(Tensor::from(text, {1, int64_t(text.size())}));
  return z;
}

/// Sets the weights of the neurons that stay out to zero: what leaving them out must give.
template <class Model>
void zero_others(Model& model, const std::vector<int64_t>& prompt, double share) {
  const auto z = activations(model, prompt);
  for (size_t b = 0; b < z.size(); ++b) {
    nn::Mlp& mlp = model.blocks[b].mlp;
    const size_t hidden = size_t(mlp.down.in);
    std::vector<std::pair<double, size_t>> order;
    for (size_t j = 0; j < hidden; ++j) {
      double sum = 0;
      for (size_t t = 0; t < prompt.size(); ++t) {
        double whole = 0;
        for (size_t k = 0; k < hidden; ++k)
          whole += double(z[b][t * hidden + k]) * double(z[b][t * hidden + k]);
        sum += double(z[b][t * hidden + j]) * double(z[b][t * hidden + j]) / whole;
      }
      order.emplace_back(-std::sqrt(sum), j);
    }
    std::sort(order.begin(), order.end());
    for (size_t i = hidden - size_t(double(hidden) * share); i < hidden; ++i)
      mlp.down.weight.detach().slice(1, int64_t(order[i].second), int64_t(order[i].second) + 1).fill(0);
  }
}

template <class Small>
void expect_generates_as_zeroed(Small& small, Small& dense, Small& zeroed) {
  const std::vector<int64_t> prompt = prompt_of(9);
  zero_others(zeroed.model, prompt, 0.6);
  models::DecodingModel chosen = griffin(small.model, 1, 16, 0.6), plain(dense.model, 1, 16),
                        fresh(dense.model, 1, 16), other(zeroed.model, 1, 16);
  const auto run = [&](models::DecodingModel& model, const auto& step_of) {
    const Tensor first = model.prefill(Tensor::from(prompt, {int64_t(prompt.size())}),
                                       nn::Sequences::uniform(1, int64_t(prompt.size())), model.cache);
    const Tensor second = step_of(model, int64_t{4});
    model.cache.advance(1);
    const Tensor third = step_of(model, int64_t{11});
    return std::tuple(first.clone().template to_vector<float>(), second.clone().template to_vector<float>(),
                      third.clone().template to_vector<float>());
  };
  const auto own = [](models::DecodingModel& model, int64_t token) {
    return model.step(Tensor::from(std::vector<int64_t>{token}, {1, 1}), model.cache);
  };
  const auto [first, second, third] = run(chosen, own);
  // The prompt runs dense, and what follows it as with zeros in place of the others, over the dense cache.
  const auto [dense_first, dense_second, dense_third] = run(plain, own);
  EXPECT_EQ(first, dense_first);
  const auto [a, expected_second, expected_third] =
      run(fresh, [&](models::DecodingModel& model, int64_t token) {
        return other.step(Tensor::from(std::vector<int64_t>{token}, {1, 1}), model.cache);
      });
  ASSERT_EQ(second.size(), expected_second.size());
  double change = 0;
  for (size_t i = 0; i < second.size(); ++i) {
    EXPECT_NEAR(second[i], expected_second[i], 2e-5);
    EXPECT_NEAR(third[i], expected_third[i], 2e-5);
    change = std::max(change, double(std::abs(second[i] - dense_second[i])));
  }
  EXPECT_GT(change, 1e-3);
}

TEST(Griffin, StepsHaveTheNeuronsThatThePromptChose) {
  {
    SmallLlama small, dense, zeroed;
    expect_generates_as_zeroed(small, dense, zeroed);
  }
  SmallGpt small, dense, zeroed;
  expect_generates_as_zeroed(small, dense, zeroed);
}

TEST(Griffin, StatisticOfTheFormula) {
  const Tensor z = Tensor::from(std::vector<float>{3, 4, 0, 0, 0, 0, 0, 0, -2}, {3, 3});
  const std::vector<double> found = neuron_statistic(z, "layer");
  EXPECT_NEAR(found[0], 0.6, 1e-12);
  EXPECT_NEAR(found[1], 0.8, 1e-12);
  EXPECT_NEAR(found[2], 1, 1e-12);
  EXPECT_EQ(largest_neurons({1, 3, 1, 2, 3}, 3), (std::vector<int64_t>{1, 3, 4}));
  EXPECT_EQ(largest_neurons({1, 1, 1}, 2), (std::vector<int64_t>{0, 1}));
  EXPECT_EQ(neurons_kept(10, 0.5), 5);
  EXPECT_EQ(neurons_kept(3, 0.99), 1);
  EXPECT_TRUE(throws(
      [] {
        neuron_statistic(Tensor::from(std::vector<float>{1, INFINITY}, {1, 2}), "the layer");
      },
      "the layer"));
}

TEST(Griffin, TextsOfNoShareAreDenseAndOthersAsWithZeros) {
  const std::vector<int64_t> text = prompt_of(13);
  const std::vector<eval::PerplexityWindow> windows{{text, 7}};  // predicted by the second half alone
  SmallLlama small, zeroed;
  const auto nats = [&](const auto& model) { return eval::measure_perplexity(model, windows, kCpu, 1).nats; };
  const double dense = nats(small.model);
  EXPECT_NEAR(nats(GriffinTexts(small.model, 0)), dense, 1e-6);
  const double half = nats(GriffinTexts(small.model, 0.6));
  EXPECT_GT(std::abs(half - dense), 1e-4);
  EXPECT_EQ(nats(small.model), dense);  // its weights are its own again
  // The same by steps: 12 tokens, of which the first 6 are the prompt.
  models::DecodingModel model = griffin(small.model, 1, 16, 0.6);
  std::vector<int64_t> prompt(text.begin(), text.begin() + 6);
  Tensor logits = model.prefill(Tensor::from(prompt, {6}), nn::Sequences::uniform(1, 6), model.cache);
  double sum = 0;
  for (size_t i = 6; i < 12; ++i) {
    logits = model.step(Tensor::from(std::vector<int64_t>{text[i]}, {1, 1}), model.cache);
    model.cache.advance(1);
    const std::vector<float> values = logits.clone().to_vector<float>();
    double whole = 0;
    for (const float value : values) whole += std::exp(double(value));
    sum += std::log(whole) - double(values[size_t(text[i + 1])]);
  }
  EXPECT_NEAR(half, sum / 6, 2e-5);
}

TEST(Griffin, WhatDoesNotFitIsRefused) {
  SmallLlama small;
  EXPECT_TRUE(throws([&] { griffin(small.model, 1, 8, 1.0); }, "a share of 1"));
  EXPECT_TRUE(throws([&] { GriffinTexts(small.model, -0.1); }, "a share of -0.1"));
  pretrained::make_sparse(small.model, {.threshold = 0.1});
  EXPECT_TRUE(throws([&] { griffin(small.model, 1, 8, 0.5); }, "blocks.0.mlp.up is compressed"));
}

}  // namespace
}  // namespace tessera::sparsity
