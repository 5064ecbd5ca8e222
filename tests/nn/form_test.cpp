#include "nn/form.h"

#include <gtest/gtest.h>

#include "autograd/tape.h"
#include "nn/embedding.h"
#include "nn/lm_head.h"
#include "nn/mlp.h"
#include "ops/cross_entropy/cross_entropy.h"
#include "ops/grouped_linear/grouped_linear.h"
#include "ops/linear/linear.h"
#include "ops/pointwise/pointwise.h"
#include "ops/swiglu/swiglu.h"
#include "tests/errors.h"
#include "tests/nn/no_recorder.h"
#include "tests/nn/random.h"

namespace tessera::nn {
namespace {

void expect_equal(const Tensor& a, const Tensor& b) {
  EXPECT_EQ(a.detach().to_vector<double>(), b.detach().to_vector<double>());
}

TEST(Form, IsDenseUnlessItIsSet) {
  Rng rng(1);
  Linear layer(3, 2, rng, kCpu, {.dtype = DType::f64});
  EXPECT_TRUE(is_dense(layer.form));
  EXPECT_STREQ(name_of(layer.form), "dense");
  const Tensor x = random({4, 3}, 2);
  expect_equal(layer(x), ops::linear(x, layer.weight, layer.bias));
  layer.form = Scaled{2};
  EXPECT_FALSE(is_dense(layer.form));
  EXPECT_STREQ(name_of(layer.form), "scaled");
}

TEST(Form, IsSavedWithTheLayer) {
  Rng rng(1);
  Linear layer(3, 2, rng);
  const auto names = [&] {
    std::vector<std::string> list;
    for_each_field(layer, [&](const std::string& name, auto&) { list.push_back(name); });
    return list;
  };
  EXPECT_EQ(names(), (std::vector<std::string>{"weight", "bias"}));  // as files of dense models have it
  layer.form = Scaled{2};
  EXPECT_EQ(names(), (std::vector<std::string>{"weight", "bias", "form.factor"}));
}

TEST(Form, AGraphIsReplayedOnlyWithTheFormsThatItWasCapturedWith) {
  Rng rng(1);
  Mlp mlp(3, 7, rng, kCpu, {.dtype = DType::f64});
  GroupedMlp grouped(2, 3, 7, 5, rng, kCpu, {.bias = false, .dtype = DType::f64});
  Linear linear(3, 3, rng, kCpu, {.dtype = DType::f64});
  const Tensor x = random({4, 3}, 2);
  Captured step(
      kCpu, [&] { mlp(x), grouped(x), linear(x); }, std::make_unique<NoRecorder>());
  const auto run = [&] {
    step(), step();
    return step.graphs();
  };
  EXPECT_EQ(run(), 1u);
  size_t graphs = 1;
  for (Form* const form :
       {&mlp.up.form, &mlp.down.form, &grouped.up.form, &grouped.down.form, &linear.form}) {
    *form = Scaled{2};
    EXPECT_EQ(run(), ++graphs);
    *form = Dense{};
    EXPECT_EQ(run(), graphs);  // the first one again
  }
  linear.form = Scaled{3};
  EXPECT_EQ(run(), ++graphs);
}

TEST(Form, ScaledMultipliesTheGemmAlone) {
  Rng rng(1);
  Linear layer(3, 2, rng, kCpu, {.dtype = DType::f64});
  GroupedLinear groups(2, 3, 2, rng, kCpu, {.dtype = DType::f64});
  layer.form = groups.form = Scaled{4};  // a power of two: nothing is rounded
  const Tensor x = random({5, 3}, 2), residual = random({5, 2}, 3);
  expect_equal(layer(x, residual),
               ops::linear(x, ops::scale(layer.weight.detach(), 4), layer.bias, residual));
  expect_equal(groups(x), ops::grouped_linear(x, ops::scale(groups.weight.detach(), 4), groups.bias));
}

TEST(Form, OfEitherLayerOfAnMlpIsComputed) {
  Rng rng(1);
  const Tensor x = random({4, 3}, 2), residual = random({4, 3}, 3);
  for (const bool gated : {false, true})
    for (const bool bias : {false, true}) {
      const ops::Activation kind = ops::Activation::silu;
      Mlp mlp(3, 7, rng, kCpu, {.activation = kind, .gated = gated, .bias = bias, .dtype = DType::f64});
      const Tensor dense = mlp(x, residual);
      const auto expected = [&](double up, double down) {
        const Tensor rows = ops::linear(ops::scale(x, up), mlp.up.weight, mlp.up.bias);
        const Tensor hidden = gated ? ops::swiglu(rows) : ops::activation(rows, kind);
        return ops::linear(ops::scale(hidden, down), mlp.down.weight, mlp.down.bias, residual);
      };
      expect_equal(dense, expected(1, 1));
      mlp.up.form = Scaled{2};
      expect_equal(mlp(x, residual), expected(2, 1));
      mlp.up.form = Dense{};
      mlp.down.form = Scaled{2};
      expect_equal(mlp(x, residual), expected(1, 2));
      mlp.down.form = Dense{};
      expect_equal(mlp(x, residual), dense);
    }
}

TEST(Form, CompressedComputesWhatTheDenseWeightDoes) {
  Rng rng(1);
  Mlp mlp(40, 70, rng, kCpu, {.gated = true, .bias = false});
  const Tensor x = random({4, 40}, 2).to(DType::f32);
  const NoTape no_tape;
  const std::vector<float> dense = mlp(x).to_vector<float>();
  for (Linear* const layer : {&mlp.up, &mlp.down}) {
    const Tensor weight = layer->weight.detach();
    const int64_t half = weight.size(0) / 2;
    Compressed form;
    form.parts.push_back({ops::compress(weight.slice(0, 0, half), ops::SparseFormat::tca_bme), {}});
    form.parts.push_back(
        {ops::compress(weight.slice(0, half, weight.size(0)), ops::SparseFormat::tiled_cbc), {}});
    layer->form = form;
    EXPECT_NE(message_of([&] {
                (*layer)(layer == &mlp.up ? x : random({1, 70}, 3).to(DType::f32));
              }).find("called with a dense weight"),
              std::string::npos);
    layer->weight = Tensor();
    EXPECT_STREQ(name_of(layer->form), "compressed");
    EXPECT_EQ(layer->form, Form(form));
    const std::vector<float> sparse = mlp(x).to_vector<float>();
    for (size_t i = 0; i < dense.size(); ++i) EXPECT_NEAR(sparse[i], dense[i], 1e-5);
  }
  GroupedLinear groups(2, 3, 2, rng);
  groups.form = Compressed{};
  EXPECT_NE(message_of([&] {
              groups(random({5, 3}, 2).to(DType::f32));
            }).find("no compressed form"),
            std::string::npos);
}

TEST(Form, OfEitherLayerOfAGroupedMlpIsComputed) {
  Rng rng(1);
  const Tensor x = random({4, 3}, 2);
  for (const bool bias : {false, true}) {
    GroupedMlp mlp(2, 3, 7, 5, rng, kCpu, {.bias = bias, .dtype = DType::f64});
    const Tensor dense = mlp(x);
    EXPECT_EQ(dense.shape(), Shape({4, 2, 5}));
    const auto expected = [&](double up, double down) {
      const Tensor hidden =
          ops::silu(ops::grouped_linear(ops::scale(x, up), mlp.up.weight, mlp.up.bias, true));
      return ops::grouped_linear(ops::scale(hidden, down), mlp.down.weight, mlp.down.bias, false);
    };
    expect_equal(dense, expected(1, 1));
    mlp.up.form = Scaled{2};
    expect_equal(mlp(x), expected(2, 1));
    mlp.up.form = Dense{};
    mlp.down.form = Scaled{2};
    expect_equal(mlp(x), expected(1, 2));
  }
}

TEST(Form, OfAnLmHeadIsPartOfItsLoss) {
  Rng rng(1);
  const Tensor x = random({3, 4}, 2), targets = Tensor::from(std::vector<int64_t>{1, -100, 5}, {3});
  const Embedding token(6, 4, rng, kCpu, {.dtype = DType::f64});
  for (const bool tied : {false, true})
    for (const bool bias : {false, true}) {
      LmHead head(4, 6, rng, kCpu, {.tied = tied, .bias = bias, .dtype = DType::f64});
      EXPECT_EQ(head.tied(), tied);
      const Tensor weight = tied ? token.weight : head.out.weight;
      expect_equal(head(x, token), ops::linear(x, weight, head.out.bias));
      EXPECT_NEAR(head.loss(x, targets, token).item(), ops::cross_entropy(head(x, token), targets).item(),
                  1e-12);
      head.out.form = Scaled{2};
      const Tensor logits = ops::linear(ops::scale(x, 2), weight, head.out.bias);
      expect_equal(head(x, token), logits);
      EXPECT_EQ(head.loss(x, targets, token).item(), ops::cross_entropy(logits, targets).item());
    }
}

struct Heads {
  LmHead own, tied;
  void fields(auto&& visit) { visit("own", own), visit("tied", tied); }
};

TEST(LmHead, HasTheParametersOfALinearLayerInItsPlace) {
  Rng rng(1);
  const Heads model{LmHead(4, 6, rng, kCpu), LmHead(4, 6, rng, kCpu, {.tied = true, .bias = true})};
  std::vector<std::string> names, layers;
  for (const NamedParameter& parameter : parameters(model)) names.push_back(parameter.name);
  EXPECT_EQ(names, (std::vector<std::string>{"own.weight", "tied.bias"}));
  for_each_linear(model, [&](const std::string& name, const auto& layer) {
    layers.push_back(name);
    EXPECT_EQ(layer.flops(5), 2.0 * 5 * 4 * 6);
  });
  EXPECT_EQ(layers, (std::vector<std::string>{"own", "tied"}));
}

}  // namespace
}  // namespace tessera::nn
