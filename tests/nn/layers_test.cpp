#include <gtest/gtest.h>

#include <cmath>

#include "nn/activation.h"
#include "nn/dropout.h"
#include "nn/embedding.h"
#include "nn/flatten.h"
#include "nn/mlp.h"
#include "nn/norm.h"
#include "nn/sequential.h"
#include "ops/dropout/dropout.h"
#include "ops/pointwise/pointwise.h"

namespace tessera::nn {
namespace {

using ops::Activation;

Tensor numbers(const Shape& shape, DType dtype = DType::f64) {
  Tensor tensor = Tensor::empty(shape, dtype, Device::cpu());
  Rng rng(17);
  init::normal(tensor, rng);
  return tensor;
}

/// Value (row, column) of a matrix.
double at(const Tensor& matrix, int64_t row, int64_t column) {
  return matrix.detach().at({row, column}).item<double>();
}

TEST(Linear, MultipliesByTheTransposeAndAddsTheBias) {
  Rng rng(1);
  const Linear layer(3, 2, rng, {.dtype = DType::f64});
  const Tensor x = numbers({4, 3}), y = layer(x);
  EXPECT_EQ(y.shape(), Shape({4, 2}));
  for (int64_t r = 0; r < 4; ++r)
    for (int64_t o = 0; o < 2; ++o) {
      double sum = layer.bias.detach().at({o}).item<double>();
      for (int64_t i = 0; i < 3; ++i) sum += at(x, r, i) * at(layer.weight, o, i);
      EXPECT_NEAR(at(y, r, o), sum, 8 * 0x1p-52);  // four additions of numbers below 4
    }
  const Linear bare(3, 2, rng, {.bias = false});
  EXPECT_FALSE(bare.bias.defined());
  EXPECT_EQ(parameters(bare).size(), 1u);
}

TEST(Linear, GradientsOfNarrowParametersAreF32) {
  Rng rng(1);
  Linear layer(5, 4, rng, {.dtype = DType::bf16});
  Tape tape;
  const Tensor y = layer(numbers({3, 5}, DType::bf16));
  tape.backward(std::vector{y}, std::vector{Tensor::full(y.shape(), 1, DType::bf16, Device::cpu())});
  EXPECT_EQ(grad(layer.weight).dtype(), DType::f32);
  for (const float value : grad(layer.bias).to_vector<float>()) EXPECT_EQ(value, 3);
}

TEST(GroupedLinear, EachGroupIsALinearLayer) {
  Rng rng(1);
  for (const bool shared : {true, false}) {
    GroupedLinear layer(3, 4, 2, rng, {.shared = shared, .dtype = DType::f64});
    const Tensor x = shared ? numbers({5, 4}) : numbers({5, 3, 4});
    const Tensor y = layer(x);
    EXPECT_EQ(y.shape(), Shape({5, 3, 2}));
    for (int64_t k = 0; k < 3; ++k) {
      Linear one(4, 2, rng, {.dtype = DType::f64});
      one.weight.copy_from(layer.weight.detach().select(0, k));
      one.bias.copy_from(layer.bias.detach().select(0, k));
      const Tensor expected = one(shared ? x : x.select(1, k));
      const std::vector<double> got = y.detach().select(1, k).to_vector<double>(),
                                want = expected.detach().to_vector<double>();
      for (size_t i = 0; i < want.size(); ++i) EXPECT_NEAR(got[i], want[i], 8 * 0x1p-52);
    }
  }
}

TEST(Mlp, IsTwoLinearLayersWithAnActivationBetween) {
  Rng rng(1);
  const Mlp layer(3, 7, rng, {.activation = Activation::silu, .out = 2, .dtype = DType::f64});
  const Tensor x = numbers({4, 3});
  const std::vector<double> got = layer(x).detach().to_vector<double>(),
                            want = layer.down(ops::silu(layer.up(x))).detach().to_vector<double>();
  ASSERT_EQ(got.size(), 8u);
  for (size_t i = 0; i < want.size(); ++i) EXPECT_NEAR(got[i], want[i], 16 * 0x1p-52);
}

TEST(Norms, StandardiseRows) {
  const LayerNorm layernorm(6, {.eps = 0, .dtype = DType::f64});
  const RmsNorm rmsnorm(6, {.eps = 0, .dtype = DType::f64});
  const Tensor x = numbers({3, 6}), y = layernorm(x), z = rmsnorm(x);
  for (int64_t r = 0; r < 3; ++r) {
    double sum = 0, square = 0, rms = 0;
    for (int64_t c = 0; c < 6; ++c)
      sum += at(y, r, c), square += at(y, r, c) * at(y, r, c), rms += at(z, r, c) * at(z, r, c);
    EXPECT_NEAR(sum, 0, 1e-14);
    EXPECT_NEAR(square, 6, 1e-14);
    EXPECT_NEAR(rms, 6, 1e-14);
  }
  EXPECT_TRUE(parameters(LayerNorm(6, {.weight = false, .bias = false})).empty());
}

TEST(Norms, AddAResidualFirst) {
  const LayerNorm layernorm(6, {.eps = 0.5, .dtype = DType::f64});
  const RmsNorm rmsnorm(6, {.eps = 0.25, .dtype = DType::f64});
  const Tensor x = numbers({3, 6}), residual = numbers({3, 6}), sum = ops::scale(x, 2);
  const ops::AddNorm centred = layernorm.add(x, residual), plain = rmsnorm.add(x, residual);
  for (const Tensor& both : {centred.sum, plain.sum})
    EXPECT_EQ(both.detach().to_vector<double>(), sum.to_vector<double>());
  EXPECT_EQ(centred.y.detach().to_vector<double>(), layernorm(sum).detach().to_vector<double>());
  EXPECT_EQ(plain.y.detach().to_vector<double>(), rmsnorm(sum).detach().to_vector<double>());
}

TEST(Norms, DropTheResidualWhileTraining) {
  const LayerNorm layernorm(6, {.dtype = DType::f64});
  const RmsNorm rmsnorm(6, {.dtype = DType::f64});
  const Tensor x = numbers({3, 6}), residual = numbers({3, 6});
  const auto expect_sum = [](const ops::AddNorm& got, const Tensor& want) {
    EXPECT_EQ(got.sum.detach().to_vector<double>(), want.to_vector<double>());
  };
  Rng rng(3), same(3);
  Dropout dropout(0.5, rng);
  expect_sum(layernorm.add(x, residual, &dropout), ops::add(x, ops::dropout(residual, 0.5, same)));
  expect_sum(rmsnorm.add(x, residual, &dropout), ops::add(x, ops::dropout(residual, 0.5, same)));
  dropout.training = false;
  EXPECT_FALSE(dropout.drops());
  expect_sum(layernorm.add(x, residual, &dropout), ops::add(x, residual));
  EXPECT_FALSE(Dropout(0, rng).drops());
}

TEST(Embedding, LooksUpRows) {
  Rng rng(1);
  const Embedding table(5, 3, rng);
  const Tensor rows = table(Tensor::from(std::vector<int64_t>{4, 0, 4}, {3}));
  EXPECT_EQ(rows.shape(), Shape({3, 3}));
  EXPECT_EQ(rows.detach().select(0, 1).to_vector<float>(),
            table.weight.detach().select(0, 0).to_vector<float>());
  EXPECT_EQ(rows.detach().select(0, 0).to_vector<float>(), rows.detach().select(0, 2).to_vector<float>());
}

TEST(Dropout, ActsWhileTrainingAlone) {
  Rng rng(1);
  Sequential model{Dropout(0.5, rng)};
  const Tensor x = Tensor::full({1000}, 1, DType::f32, Device::cpu());
  int zeros = 0;
  for (const float value : model(x).to_vector<float>()) {
    EXPECT_TRUE(value == 0 || value == 2);
    zeros += value == 0;
  }
  EXPECT_NEAR(zeros, 500, 6 * std::sqrt(250.0));
  set_training(model, false);
  EXPECT_TRUE(model(x).shares_storage(x));
  EXPECT_THROW(Dropout(1, rng), Error);
}

/// A model with a generator of its own.
struct Noisy {
  explicit Noisy(uint64_t seed) : rng(seed) {}
  Rng rng;
  Dropout dropout{0.5, rng};
};

// The dropout pointed to the generator of a model that was gone.
TEST(Dropout, FollowsAModelThatIsReturnedByValue) {
  const Tensor x = Tensor::full({100}, 1, DType::f32, Device::cpu());
  std::vector<Noisy> models;
  for (const uint64_t seed : {3, 4}) models.push_back(Noisy(seed));  // the second push moves the first
  Rng same(3);
  EXPECT_EQ(models[0].dropout(x).to_vector<float>(), ops::dropout(x, 0.5, same).to_vector<float>());
  EXPECT_EQ(models[0].rng.state(), same.state());
}

TEST(Sequential, RunsInOrderAndNamesItsParts) {
  Rng rng(42);
  const Sequential model{Linear(4, 8, rng), Gelu{}, Linear(8, 2, rng, {.bias = false})};
  std::vector<std::string> names;
  for (const NamedParameter& parameter : parameters(model)) names.push_back(parameter.name);
  EXPECT_EQ(names, (std::vector<std::string>{"0.weight", "0.bias", "2.weight"}));
  EXPECT_EQ(count_parameters(model), 4 * 8 + 8 + 8 * 2);
  const Tensor x = numbers({3, 4}, DType::f32);
  const auto& [first, gelu, last] = model.layers;
  EXPECT_EQ(model(x).detach().to_vector<float>(), last(gelu(first(x))).detach().to_vector<float>());
}

TEST(Sequential, HasLayersForTheShapesAndCurvesOfConvolutionalNetworks) {
  Rng rng(42);
  const Sequential model{Flatten{}, Linear(6, 4, rng), Tanh{}, Linear(4, 1, rng), Sigmoid{}};
  const auto& [flatten, first, tanh, second, sigmoid] = model.layers;
  const Tensor x = numbers({5, 2, 3}, DType::f32);
  const Tensor flat = x.reshape({5, 6});
  EXPECT_EQ(flatten(x).shape(), (Shape{5, 6}));
  EXPECT_EQ(flatten(numbers({5})).shape(), (Shape{5, 1}));
  EXPECT_EQ(flatten(numbers({0, 2, 3})).shape(), (Shape{0, 6}));
  EXPECT_THROW(flatten(numbers({})), Error);
  EXPECT_EQ(model(x).detach().to_vector<float>(),
            ops::sigmoid(second(ops::tanh(first(flat)))).detach().to_vector<float>());
}

TEST(Layers, OptionsNeedNoDevice) {
  Rng rng(42);
  EXPECT_FALSE(Linear(2, 3, rng, {.bias = false}).bias.defined());
  EXPECT_FALSE(GroupedLinear(2, 2, 3, rng, {.bias = false}).bias.defined());
  EXPECT_FALSE(Mlp(2, 3, rng, {.bias = false}).up.bias.defined());
  EXPECT_FALSE(GroupedMlp(2, 2, 3, 4, rng, {.bias = false}).up.bias.defined());
  EXPECT_EQ(Embedding(2, 3, rng, {.dtype = DType::f64}).weight.dtype(), DType::f64);
  EXPECT_EQ(LayerNorm(2, {.eps = 0.5}).eps, 0.5);
  EXPECT_EQ(RmsNorm(2, {.eps = 0.5}).eps, 0.5);
}

TEST(Sequential, TellsTheFiniteCheckWhereItIs) {
  Rng rng(1);
  const Sequential model{Relu{}, Sequential{Silu{}, Linear(2, 2, rng)}};
  Tape tape({.check_finite = true});
  try {
    model(Tensor::full({1, 2}, INFINITY, DType::f32, Device::cpu()));
    FAIL() << "expected an error";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("1.1"), std::string::npos) << error.what();
  }
}

}  // namespace
}  // namespace tessera::nn
