#include "nn/low_rank.h"

#include <gtest/gtest.h>

#include <cmath>
#include <set>

#include "autograd/tape.h"
#include "nn/lm_head.h"
#include "nn/mlp.h"
#include "nn/summary.h"
#include "ops/cross_entropy/cross_entropy.h"
#include "ops/linear/linear.h"
#include "ops/matmul/matmul.h"
#include "ops/pointwise/pointwise.h"
#include "ops/reduce/reduce.h"
#include "ops/shape/shape.h"
#include "tests/errors.h"
#include "tests/nn/random.h"

namespace tessera::nn {
namespace {

void expect_near(const Tensor& x, const Tensor& y, double tolerance = 1e-12) {
  const std::vector<double> a = x.detach().to_vector<double>(), b = y.detach().to_vector<double>();
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) EXPECT_NEAR(a[i], b[i], tolerance) << i;
}

Linear dense(int64_t in, int64_t out, uint64_t seed = 1) {
  Rng rng(seed);
  return Linear(in, out, rng, kCpu, {.dtype = DType::f64});
}

FactorOptions options_of(FactorKind kind, int64_t rank, FactorInit init = FactorInit::svd) {
  return {.kind = kind, .rank = rank, .init = init};
}

/// A layer [7, 6] of two parts whose factors are drawn, in every kind; its values are not those of the
/// paper's start, some of which are zeros.
Linear factored(FactorKind kind, const std::vector<int64_t>& rows, uint64_t seed = 1) {
  Linear layer = dense(7, 6, seed);
  Rng rng(seed + 10);
  FactorOptions options = options_of(kind, 2, FactorInit::blank);
  options.density = 0.3, options.column_share = 0.4, options.gamma = 0.3, options.alpha = 3;
  if (kind != FactorKind::cola) options.init = FactorInit::svd;
  factorize(layer, rows, options, rng);
  for_each_field(layer, [&](const std::string&, auto& leaf) {
    if constexpr (std::is_same_v<std::remove_cvref_t<decltype(leaf)>, Tensor>)
      if (is_floating(leaf.dtype()) && requires_grad(leaf))
        leaf.detach().copy_from(random(leaf.shape(), ++seed));
  });
  return layer;
}

const std::vector<std::vector<int64_t>> kParts = {{6}, {3, 3}, {4, 2}, {2, 2, 2}};

TEST(LowRank, ComputesItsProductWhateverTheParts) {
  for (const FactorKind kind : {FactorKind::low_rank, FactorKind::sltrain, FactorKind::lost})
    for (const auto& rows : kParts) {
      Linear layer = factored(kind, rows);
      EXPECT_FALSE(layer.weight.defined());
      EXPECT_STREQ(name_of(layer.form), name_of(kind));
      const Tensor x = random({2, 5, 7}, 3), residual = random({2, 5, 6}, 4);
      ASSERT_TRUE(merges(layer.form));
      expect_near(layer(x, residual), ops::linear(x, merged_weight(layer), layer.bias, residual));
      expect_near(layer(random({1, 7}, 5)), ops::linear(random({1, 7}, 5), merged_weight(layer), layer.bias));
    }
}

TEST(LowRank, MergesToTheFormulaOfEachForm) {
  for (const auto& rows : kParts) {
    const Linear low = factored(FactorKind::low_rank, rows), sparse = factored(FactorKind::sltrain, rows),
                 lost = factored(FactorKind::lost, rows);
    const auto product = [&](const Form& form) {
      const std::vector<FactorPair> pairs = pairs_of(*factors_of(form));
      std::vector<Tensor> parts;
      for (const FactorPair& pair : pairs) parts.push_back(ops::matmul(pair.b, pair.a));
      return ops::concat(parts, 0);
    };
    expect_near(merged_weight(low), product(low.form));

    const auto& s = std::get<SparsePlusLowRank>(sparse.form);
    EXPECT_EQ(s.scale, 1.5);  // alpha / rank
    std::vector<double> expected = ops::scale(product(sparse.form), 1.5).to_vector<double>();
    const std::vector<double> values = s.values.detach().to_vector<double>();
    const std::vector<int32_t> places = s.support.to_vector<int32_t>();
    for (size_t i = 0; i < places.size(); ++i) expected[size_t(places[i])] += values[i];
    EXPECT_EQ(merged_weight(sparse).to_vector<double>().size(), expected.size());
    expect_near(merged_weight(sparse), Tensor::from(expected, {6, 7}));

    const auto& c = std::get<ColumnsPlusLowRank>(lost.form);
    expected = ops::scale(product(lost.form), 0.3).to_vector<double>();
    const std::vector<double> columns = c.c.detach().to_vector<double>();
    const std::vector<int32_t> chosen = c.columns.to_vector<int32_t>();
    const size_t count = size_t(c.c.size(1));
    size_t row = 0;
    for (size_t p = 0; p < rows.size(); ++p)
      for (int64_t r = 0; r < rows[p]; ++r, ++row)
        for (size_t k = 0; k < count; ++k)
          expected[row * 7 + size_t(chosen[p * count + k])] += 0.7 * columns[row * count + k];
    expect_near(merged_weight(lost), Tensor::from(expected, {6, 7}));
  }
}

TEST(LowRank, ColaHasItsActivationBetweenTheFactors) {
  for (const ops::Activation kind : {ops::Activation::silu, ops::Activation::relu_squared})
    for (const auto& rows : kParts) {
      Linear layer = factored(FactorKind::cola, rows);
      auto& form = std::get<Cola>(layer.form);
      form.activation = kind;
      const Tensor x = random({5, 7}, 3);
      std::vector<Tensor> parts;
      for (const FactorPair& pair : pairs_of(form.factors))
        parts.push_back(ops::linear(ops::activation(ops::linear(x, pair.a), kind), pair.b));
      expect_near(layer(x), ops::add(ops::concat(parts, 1), layer.bias.detach()));
      EXPECT_FALSE(merges(layer.form));
      expect_error([&] { merged_weight(layer); }, {"cola", "no dense weight"});
    }
}

TEST(LowRank, GradientsAreThoseOfCentralDifferences) {
  for (const FactorKind kind :
       {FactorKind::low_rank, FactorKind::cola, FactorKind::sltrain, FactorKind::lost})
    for (const auto& rows : kParts) {
      const Linear layer = factored(kind, rows);
      std::vector<Tensor> inputs{random({3, 7}, 9)};
      require_grad(inputs[0], DType::f64);
      for (const NamedParameter& parameter : parameters(layer)) inputs.push_back(parameter.tensor);
      const auto loss = [&] {
        const Tensor y = layer(inputs[0]);
        return ops::sum(ops::mul(y, ops::mul(y, y)));
      };
      Tape tape;
      const Tensor result = loss();
      tape.backward(result);
      for (const Tensor& input : inputs) {
        const std::vector<double> analytic = grad(input).to_vector<double>();
        const Tensor at = input.detach();
        const std::vector<double> before = at.to_vector<double>();
        for (size_t i = 0; i < before.size(); i += 3) {
          const auto moved = [&](double by) {
            std::vector<double> values = before;
            values[i] += by;
            at.copy_from(Tensor::from(values, at.shape()));
            const NoTape off;
            return loss().item<double>();
          };
          const double step = 1e-6, numeric = (moved(step) - moved(-step)) / (2 * step);
          at.copy_from(Tensor::from(before, at.shape()));
          EXPECT_NEAR(analytic[i], numeric, 1e-5 * std::max(1.0, std::abs(numeric)))
              << name_of(kind) << " element " << i << " of " << describe(input);
        }
      }
    }
}

TEST(LowRank, StartsAsTheBestApproximationOfTheDenseWeight) {
  for (const auto& rows : kParts)
    for (const FactorKind kind : {FactorKind::low_rank, FactorKind::sltrain, FactorKind::lost}) {
      Linear layer = dense(7, 6);
      const Tensor weight = layer.weight.detach().clone();
      Rng rng(3);
      FactorOptions options = options_of(kind, 2);
      options.density = 1, options.column_share = 1;  // all of what the rank leaves
      factorize(layer, rows, options, rng);
      if (kind != FactorKind::low_rank) expect_near(merged_weight(layer), weight, 1e-10);
      if (rows == std::vector<int64_t>{2, 2, 2})
        expect_near(merged_weight(layer), weight, 1e-10);  // of full rank
    }
}

TEST(LowRank, DrawsAsThePapersDo) {
  Rng init(1), rng(2);
  Linear cola(64, 192, init, kCpu, {.dtype = DType::f64}), sparse(64, 192, init, kCpu, {.dtype = DType::f64});
  factorize(cola, {64, 128}, options_of(FactorKind::cola, 16, FactorInit::drawn), rng);
  const auto deviation = [](const Tensor& t) {
    double sum = 0;
    for (const double value : t.detach().to_vector<double>()) sum += value * value;
    return std::sqrt(sum / double(t.count()));
  };
  const std::vector<FactorPair> pairs = pairs_of(*factors_of(cola.form));
  for (const FactorPair& pair : pairs) {
    const double expected = std::pow(16, -0.25) * std::pow(64.0 + double(pair.b.size(0)), -0.25);
    EXPECT_NEAR(deviation(pair.a), expected, 0.1 * expected);  // of 1,024 numbers: 4 standard errors
    EXPECT_NEAR(deviation(pair.b), expected, 0.1 * expected);
  }
  FactorOptions options = options_of(FactorKind::sltrain, 16, FactorInit::drawn);
  factorize(sparse, {64, 128}, options, rng);
  const auto& form = std::get<SparsePlusLowRank>(sparse.form);
  EXPECT_EQ(deviation(form.factors.b), 0);
  EXPECT_EQ(form.scale, 2);
  EXPECT_EQ(form.values.count(), std::llround(0.03 * 64 * 64) + std::llround(0.03 * 128 * 64));
  const std::vector<int32_t> places = form.support.to_vector<int32_t>();
  EXPECT_TRUE(std::is_sorted(places.begin(), places.end()));
  EXPECT_EQ(std::set<int32_t>(places.begin(), places.end()).size(), places.size());
  EXPECT_LT(places.back(), 64 * 192);
  EXPECT_NEAR(deviation(form.factors.a), 0.125 / std::sqrt(3), 0.005);
}

TEST(LowRank, ChoosesTheColumnsAsAsked) {
  // Rank 1 takes (1, 1, 1)^T (1, 0, ...); columns 2 and 4 are what remains, 4 the smaller one.
  const Tensor weight =
      Tensor::from(std::vector<double>{9, 0, 1, 0, 0.5, 9, 0, -1, 0, 0, 9, 0, 0, 0, -0.5}, {3, 5});
  const auto columns = [&](ColumnChoice choice, double share, const Tensor& gradient = {}) {
    Linear layer = dense(5, 3);
    layer.weight.detach().copy_from(weight);
    Rng rng(1);
    FactorOptions options = options_of(FactorKind::lost, 1);
    options.columns = choice, options.column_share = share;
    factorize(layer, {3}, options, rng, gradient);
    return std::get<ColumnsPlusLowRank>(layer.form).columns.to_vector<int32_t>();
  };
  EXPECT_EQ(columns(ColumnChoice::residual, 0.2), (std::vector<int32_t>{2}));
  EXPECT_EQ(columns(ColumnChoice::residual, 0.4), (std::vector<int32_t>{2, 4}));
  const Tensor gradient =
      Tensor::from(std::vector<double>{0, 1, 0, 3, 0, 0, 1, 0, 0, 0, 2, 1, 0, 0, 0}, {3, 5});
  EXPECT_EQ(columns(ColumnChoice::gradient, 0.4, gradient), (std::vector<int32_t>{0, 3}));
  EXPECT_EQ(columns(ColumnChoice::random, 0.6).size(), 3u);
}

TEST(LowRank, CountsWhatTheLayersHave) {
  for (const FactorKind kind :
       {FactorKind::low_rank, FactorKind::cola, FactorKind::sltrain, FactorKind::lost})
    for (const auto& rows : kParts) {
      Linear layer = dense(7, 6);
      Rng rng(1);
      FactorOptions options = options_of(kind, 2, FactorInit::blank);
      factorize(layer, rows, options, rng);
      double parameters = 0, flops = 0;
      for (const int64_t each : rows) {
        parameters += count_factors(options, each, 7).parameters;
        flops += 2 * 5 * count_factors(options, each, 7).multiply_adds;
      }
      EXPECT_EQ(double(count_parameters(layer)), parameters + 6);
      EXPECT_EQ(layer.flops(5), flops);
      EXPECT_EQ(summary(layer, 5).total.flops, flops);
    }
}

TEST(LowRank, OfEitherLayerOfAnMlpIsComputed) {
  Rng rng(1);
  const Tensor x = random({4, 6}, 2);
  for (const bool gated : {false, true}) {
    Mlp mlp(6, 8, rng, kCpu, {.gated = gated, .bias = false, .dtype = DType::f64});
    const Tensor before = mlp(x);
    const std::vector<int64_t> rows = gated ? std::vector<int64_t>{8, 8} : std::vector<int64_t>{8};
    factorize(mlp.up, rows, options_of(FactorKind::low_rank, 6), rng);  // of full rank
    factorize(mlp.down, {6}, options_of(FactorKind::low_rank, 6), rng);
    expect_near(mlp(x), before, 1e-10);
  }
}

// An LM head without a dense weight is not a tied one.
TEST(LowRank, OfAnLmHeadIsItsOwnWeight) {
  Rng rng(1);
  LmHead head(7, 6, rng, kCpu, {.bias = true, .dtype = DType::f64});
  const Embedding token(6, 7, rng, kCpu, {.dtype = DType::f64});
  factorize(head.out, {6}, options_of(FactorKind::low_rank, 2), rng);
  EXPECT_FALSE(head.tied());
  const Tensor x = random({3, 7}, 2), logits = ops::linear(x, merged_weight(head.out), head.out.bias);
  expect_near(head(x, token), logits);
  const Tensor targets = Tensor::from(std::vector<int64_t>{5, -100, 0}, {3});
  expect_near(head.loss(x, targets, token), ops::cross_entropy(logits, targets));
}

TEST(LowRank, SaysWhatIsWrong) {
  const auto fails = [](FactorOptions options, const std::vector<int64_t>& rows,
                        std::initializer_list<const char*> parts) {
    Linear layer = dense(7, 6);
    Rng rng(1);
    expect_error([&] { factorize(layer, rows, options, rng); }, parts);
    EXPECT_TRUE(layer.weight.defined());
    EXPECT_TRUE(is_dense(layer.form));
  };
  fails(options_of(FactorKind::low_rank, 0), {6}, {"rank (--rank) is 0", "1 or more"});
  fails(options_of(FactorKind::low_rank, -3), {6}, {"rank (--rank) is -3"});
  fails(options_of(FactorKind::low_rank, 7), {6}, {"rank (--rank) is 7", "6 x 7 takes 1 to 6"});
  fails(options_of(FactorKind::sltrain, 3), {4, 2}, {"rank (--rank) is 3", "2 x 7 takes 1 to 2"});
  fails(options_of(FactorKind::low_rank, 2), {4, 1}, {"do not add up to 6"});
  fails(options_of(FactorKind::cola, 2), {6}, {"cola", "cannot start from one"});
  fails(options_of(FactorKind::lost, 2, FactorInit::drawn), {6},
        {"lost", "choose the init svd (--factor-init svd)"});
  FactorOptions options = options_of(FactorKind::sltrain, 2);
  options.density = 1.5;
  fails(options, {6}, {"--density", "1.5", "0 to 1"});
  options = options_of(FactorKind::sltrain, 2, FactorInit::drawn);
  options.density = 0.01;
  fails(options, {4, 2}, {"density (--density) of 0.01 leaves no element of a weight of 6 x 7", "0.0357"});
  options = options_of(FactorKind::lost, 2);
  options.gamma = 1;
  fails(options, {6}, {"--gamma", "less than 1"});
  options = options_of(FactorKind::lost, 2);
  options.columns = ColumnChoice::gradient;
  fails(options, {6}, {"columns by their gradient"});
  expect_error([] { parse_factor_kind("lora"); }, {"lora", "low_rank, cola, sltrain or lost"});

  Linear twice = dense(7, 6);
  Rng rng(1);
  factorize(twice, {6}, options_of(FactorKind::low_rank, 2), rng);
  expect_error([&] { factorize(twice, {6}, options_of(FactorKind::low_rank, 2), rng); },
               {"the layer is low_rank", "dense weight"});
  expect_error([&] { twice.with(random({6, 7}, 1), random({2, 7}, 2)); }, {"made of factors (low_rank)"});
  GroupedLinear groups(2, 3, 2, rng);
  groups.form = LowRank{};
  expect_error([&] { groups(random({5, 3}, 2).to(DType::f32)); }, {"layers in groups", "low_rank"});
  Linear broken = dense(7, 6);
  broken.weight.detach().fill(std::nan(""));
  expect_error([&] { factorize(broken, {6}, options_of(FactorKind::low_rank, 2), rng); },
               {"svd", "not finite"});
}

}  // namespace
}  // namespace tessera::nn
