#include "optim/optimizer.h"

#include <cmath>
#include <limits>

#include "gradients.h"
#include "nn/linear.h"
#include "optim/adamw.h"
#include "optim/muon.h"
#include "optim/sgd.h"
#include "runtime/capture.h"
#include "tests/errors.h"

namespace tessera::optim {
namespace {

constexpr int kSteps100 = 100;
// The reference does the same operations in another order: a few roundings of 2^-53 a step, 100 steps, values
// of about 1.
constexpr double kTolerance = 1e-12;

/// The gradient of a made-up problem: depends on the weight and on the step.
double made_up_gradient(double w, double target, int step) {
  return 0.7 * (w - target) + 0.1 * std::sin(double(step) + 3 * target);
}

struct ScalarAdamW {
  double m = 0, v = 0;
  double step(double w, double g, int t, const AdamWOptions& o) {
    m = o.beta1 * m + (1 - o.beta1) * g;
    v = o.beta2 * v + (1 - o.beta2) * g * g;
    const double m_hat = m / (1 - std::pow(o.beta1, t)), v_hat = v / (1 - std::pow(o.beta2, t));
    return w * (1 - o.lr * o.weight_decay) - o.lr * m_hat / (std::sqrt(v_hat) + o.eps);
  }
};

TEST(AdamW, HundredStepsInF64EqualTheScalarReference) {
  const AdamWOptions options{.lr = 0.02, .weight_decay = 0.3};
  const Shape shape{7, 5};  // rows of 40 bytes: pitched
  Tensor weight = new_parameter(1, shape, DType::f64, Device::cpu());
  AdamW optimizer({{"weight", weight}}, options);
  std::vector<double> expected = numbers(1, shape.count());
  const std::vector<double> target = numbers(2, shape.count());
  std::vector<ScalarAdamW> reference(expected.size());
  for (int t = 1; t <= kSteps100; ++t) {
    const std::vector<double> now = weight.to_vector<double>();
    std::vector<double> gradient(now.size());
    for (size_t i = 0; i < now.size(); ++i) {
      gradient[i] = made_up_gradient(now[i], target[i], t);
      expected[i] = reference[i].step(expected[i], made_up_gradient(expected[i], target[i], t), t, options);
    }
    arrive(weight, Tensor::from(gradient, shape));
    optimizer.step();
    optimizer.zero_grad();
  }
  const std::vector<double> got = weight.to_vector<double>();
  for (size_t i = 0; i < got.size(); ++i) EXPECT_NEAR(got[i], expected[i], kTolerance) << i;
  EXPECT_EQ(optimizer.steps(), kSteps100);
}

struct SgdCase {
  double momentum;
  bool nesterov;
};

class SgdReference : public testing::TestWithParam<SgdCase> {};

TEST_P(SgdReference, HundredStepsInF64EqualTheScalarReference) {
  const SgdOptions options{
      .lr = 0.05, .momentum = GetParam().momentum, .nesterov = GetParam().nesterov, .weight_decay = 0.1};
  const Shape shape{3, 11};
  Tensor weight = new_parameter(1, shape, DType::f64, Device::cpu());
  Sgd optimizer({{"weight", weight}}, options);
  std::vector<double> expected = numbers(1, shape.count()), velocity(expected.size());
  const std::vector<double> target = numbers(2, shape.count());
  for (int t = 1; t <= kSteps100; ++t) {
    const std::vector<double> now = weight.to_vector<double>();
    std::vector<double> gradient(now.size());
    for (size_t i = 0; i < now.size(); ++i) {
      gradient[i] = made_up_gradient(now[i], target[i], t);
      const double g = made_up_gradient(expected[i], target[i], t) + options.weight_decay * expected[i];
      velocity[i] = options.momentum * velocity[i] + g;
      expected[i] -= options.lr * (options.nesterov ? g + options.momentum * velocity[i] : velocity[i]);
    }
    arrive(weight, Tensor::from(gradient, shape));
    optimizer.step();
    optimizer.zero_grad();
  }
  const std::vector<double> got = weight.to_vector<double>();
  for (size_t i = 0; i < got.size(); ++i) EXPECT_NEAR(got[i], expected[i], kTolerance) << i;
}

INSTANTIATE_TEST_SUITE_P(Momentum, SgdReference,
                         testing::Values(SgdCase{0, false}, SgdCase{0.9, false}, SgdCase{0.9, true}));

class OptimizerOn : public OnDevice {};
INSTANTIATE_TEST_SUITE_P(Device, OptimizerOn, testing::Values("cpu", "cuda"));

/// Shapes that meet every path of the kernels: rank 0 and 1, short dense rows, pitched odd rows, more than a
/// chunk in one row, several rows per chunk, nothing at all.
const std::vector<Shape> kUpdateShapes{{},        {1},     {5},        {4, 3}, {3, 5},    {6, 1365},
                                       {2, 3, 9}, {16385}, {2, 16385}, {0, 7}, {5000, 5}, {64, 256}};

TEST_P(OptimizerOn, EveryShapeAndDtypeEqualsTheF64Optimizer) {
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
    std::vector<nn::NamedParameter> list, oracle;
    for (size_t i = 0; i < kUpdateShapes.size(); ++i) {
      list.push_back({"p" + std::to_string(i), new_parameter(i, kUpdateShapes[i], dtype, device())});
      Tensor exact = list.back().tensor.detach().to(Device::cpu()).to(DType::f64);
      nn::make_parameter(exact);
      oracle.push_back({list.back().name, exact});
    }
    const AdamWOptions options{.lr = 0.01, .weight_decay = 0.1, .max_grad_norm = 1};
    AdamW optimizer(list, options), reference(oracle, options);
    for (uint64_t t = 0; t < 5; ++t) {
      for (size_t i = 0; i < kUpdateShapes.size(); ++i) {
        const Tensor gradient =
            Tensor::from(numbers(100 + 50 * t + i, kUpdateShapes[i].count()), kUpdateShapes[i])
                .to(dtype)
                .to(DType::f64);
        arrive(list[i].tensor, gradient);
        arrive(oracle[i].tensor, gradient);
      }
      optimizer.step(), optimizer.zero_grad();
      reference.step(), reference.zero_grad();
      // Sums of squares of the same numbers, in f64, in different orders.
      EXPECT_NEAR(optimizer.grad_norm() / reference.grad_norm(), 1, 1e-12);
    }
    for (size_t i = 0; i < kUpdateShapes.size(); ++i) {
      const std::vector<double> got = list[i].tensor.detach().to_vector<double>(),
                                want = oracle[i].tensor.to_vector<double>();
      // Weights below 2; five f32 steps of about ten roundings each on updates of 0.01 and one of the weight
      // a step: 5 * 2 ulp at 2 is 2.4e-6. A narrow weight is rounded once more.
      const double tolerance = 2.4e-6 + (dtype == DType::f32 ? 0 : epsilon(dtype));
      for (size_t k = 0; k < got.size(); ++k)
        ASSERT_NEAR(got[k], want[k], tolerance) << dtype << kUpdateShapes[i] << " element " << k;
    }
  }
}

TEST_P(OptimizerOn, PadsBetweenRowsAreNeitherReadNorWritten) {
  // The weight is the left part of a wider tensor whose right part holds NaN.
  const Tensor wide = Tensor::full({4, 24}, std::numeric_limits<double>::quiet_NaN(), DType::f32, device());
  Tensor weight = wide.slice(1, 0, 13);
  weight.fill(1);
  nn::make_parameter(weight);
  Sgd optimizer({{"weight", weight}}, {.lr = 1});
  arrive(weight, Tensor::full({4, 13}, 0.25, DType::f32, Device::cpu()));
  optimizer.step();
  EXPECT_EQ(optimizer.grad_norm(), std::sqrt(52.0) / 4);
  for (const float value : weight.detach().to_vector<float>()) EXPECT_EQ(value, 0.75f);
  for (const float value : wide.slice(1, 13, 24).to_vector<float>()) EXPECT_TRUE(std::isnan(value));
}

TEST_P(OptimizerOn, SmallUpdatesOfABf16WeightAddUpInTheMaster) {
  Tensor weight = Tensor::full({8}, 1, DType::bf16, device());
  nn::make_parameter(weight);
  Sgd optimizer({{"weight", weight}}, {.lr = 1});
  // 2^-10 is an eighth of the distance below 1: one update alone would be rounded away. 64 of them are exact.
  for (int i = 0; i < 64; ++i) {
    arrive(weight, Tensor::full({8}, 1.0 / 1024, DType::f32, Device::cpu()));
    optimizer.step();
    optimizer.zero_grad();
  }
  for (const double value : weight.detach().to_vector<double>()) EXPECT_EQ(value, 1 - 64.0 / 1024);
}

TEST_P(OptimizerOn, ClippingScalesAllGradientsToTheNorm) {
  Tensor a = Tensor::zeros({3}, DType::f32, device()), b = Tensor::zeros({2, 2}, DType::f32, device());
  nn::make_parameter(a), nn::make_parameter(b);
  Sgd optimizer({{"a", a}, {"b", b}}, {.lr = 1, .max_grad_norm = 0.5});
  arrive(a, Tensor::full({3}, 2, DType::f32, Device::cpu()));
  arrive(b, Tensor::full({2, 2}, -1, DType::f32, Device::cpu()));
  optimizer.step();
  EXPECT_EQ(optimizer.grad_norm(), 4.0);  // sqrt(3 * 4 + 4 * 1)
  const double factor = 0.5 / (4.0 + 1e-6);
  for (const float value : a.detach().to_vector<float>()) EXPECT_FLOAT_EQ(value, float(-2 * factor));
  for (const float value : b.detach().to_vector<float>()) EXPECT_FLOAT_EQ(value, float(factor));
  // Below the limit nothing is scaled.
  optimizer.zero_grad();
  arrive(a, Tensor::full({3}, 0.25, DType::f32, Device::cpu()));
  const std::vector<float> before = a.detach().to_vector<float>();
  optimizer.step();
  const std::vector<float> after = a.detach().to_vector<float>();
  for (size_t i = 0; i < 3; ++i) EXPECT_EQ(after[i], before[i] - 0.25f);
}

std::vector<std::vector<double>> state_of(Optimizer& optimizer) {
  std::vector<std::vector<double>> state;
  for (const auto& parameter : optimizer.parameters())
    state.push_back(parameter.tensor.detach().to_vector<double>());
  for_each_field(optimizer, [&](const std::string& name, auto& leaf) {
    if constexpr (std::is_same_v<std::remove_cvref_t<decltype(leaf)>, Tensor>)
      if (name != "counts") state.push_back(leaf.template to_vector<double>());
  });
  return state;
}

TEST_P(OptimizerOn, ANonFiniteGradientChangesNothingAndIsCounted) {
  for (const double bad : {std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity(),
                           -std::numeric_limits<double>::infinity()}) {
    Tensor a = new_parameter(1, {3, 5}, DType::bf16, device()),
           b = new_parameter(2, {9}, DType::f32, device());
    AdamW optimizer({{"a", a}, {"b", b}}, {.max_grad_norm = 1});
    arrive(a, Tensor::from(numbers(3, 15), {3, 5}));
    optimizer.step(), optimizer.zero_grad();
    const auto before = state_of(optimizer);
    std::vector<double> gradient = numbers(4, 9);
    gradient[8] = bad;
    arrive(b, Tensor::from(gradient, {9}));
    optimizer.step(), optimizer.zero_grad();
    EXPECT_EQ(state_of(optimizer), before);
    EXPECT_FALSE(std::isfinite(optimizer.grad_norm()));
    EXPECT_EQ(optimizer.skipped(), 1);
    EXPECT_EQ(optimizer.steps(), 1);
    arrive(b, Tensor::from(numbers(5, 9), {9}));
    optimizer.step();
    EXPECT_NE(state_of(optimizer), before);
    EXPECT_EQ(optimizer.steps(), 2);
  }
}

TEST_P(OptimizerOn, AGradientThatDidNotArriveCountsAsZero) {
  Tensor a = Tensor::full({2}, 1, DType::f32, device()), b = Tensor::full({2}, 1, DType::f32, device());
  nn::make_parameter(a), nn::make_parameter(b);
  Sgd optimizer({{"a", a}, {"b", b}}, {.lr = 1});
  const Tensor one = Tensor::full({2}, 1, DType::f32, Device::cpu());
  arrive(a, one), arrive(b, one);
  optimizer.step(), optimizer.zero_grad();
  arrive(a, one);  // b's gradient of the last step must not act again
  optimizer.step();
  EXPECT_EQ(a.detach().to_vector<float>(), (std::vector<float>{-1, -1}));
  EXPECT_EQ(b.detach().to_vector<float>(), (std::vector<float>{0, 0}));
}

TEST_P(OptimizerOn, GradientsOfSeveralBackwardPassesAddUp) {
  const auto run = [&](bool at_once) {
    Tensor weight = new_parameter(1, {2, 6}, DType::f32, device());
    AdamW optimizer({{"weight", weight}});
    const Tensor quarter = Tensor::full({2, 6}, 0.25, DType::f32, Device::cpu());
    if (at_once) {
      arrive(weight, Tensor::full({2, 6}, 1, DType::f32, Device::cpu()));
    } else {
      for (int i = 0; i < 4; ++i) arrive(weight, quarter);
    }
    optimizer.step();
    return weight.detach().to_vector<float>();
  };
  EXPECT_EQ(run(true), run(false));
}

TEST_P(OptimizerOn, WhatLiesInPadsReachesNoElement) {
  // Rows of 9 f32 are pitched to 12: the optimizer takes such a weight as one long row.
  for (const DType dtype : {DType::f32, DType::bf16}) {
    std::vector<std::vector<double>> results;
    for (const double pad : {0.0, std::nan("")}) {
      Tensor weight = new_parameter(3, {6, 9}, dtype, device());
      const int64_t pitch = weight.row_stride();
      ASSERT_GT(pitch, 9);
      Layout pads = Layout::pitched({5, pitch - 9}, pitch);
      pads.offset = 9;
      Tensor::view_of(weight.storage(), pads, dtype).fill(pad);
      AdamW optimizer({{"weight", weight}}, {.lr = 0.1, .weight_decay = 0.1, .max_grad_norm = 1});
      for (int step = 0; step < 3; ++step) {
        arrive(weight, Tensor::from(numbers(40 + uint64_t(step), 54), {6, 9}));
        optimizer.step(), optimizer.zero_grad();
      }
      EXPECT_EQ(optimizer.skipped(), 0);
      results.push_back(weight.to_vector<double>());
      results.back().push_back(optimizer.grad_norm());
    }
    EXPECT_EQ(results[0], results[1]) << dtype;
  }
}

TEST_P(OptimizerOn, ColumnsBesideAWeightAreNotItsPads) {
  const Tensor wide = Tensor::full({6, 20}, 0.5, DType::f32, device());
  Tensor weight = wide.slice(1, 0, 9);
  nn::make_parameter(weight);
  AdamW optimizer({{"weight", weight}}, {.lr = 0.1, .weight_decay = 0.1});
  arrive(weight, Tensor::from(numbers(7, 54), {6, 9}));
  optimizer.step();
  EXPECT_EQ(wide.slice(1, 9, 20).to_vector<float>(), std::vector<float>(66, 0.5f));
  for (const float value : weight.to_vector<float>()) EXPECT_NE(value, 0.5f);
}

TEST_P(OptimizerOn, GradientsKeepTheirPlaceInTheArena) {
  Tensor weight = new_parameter(1, {3, 5}, DType::f32, device());
  AdamW optimizer({{"weight", weight}});
  for (int i = 0; i < 3; ++i) {
    arrive(weight, Tensor::from(numbers(9, 15), {3, 5}));
    EXPECT_TRUE(grad(weight).shares_storage(optimizer.gradients()));
    optimizer.step();
    optimizer.zero_grad();
  }
}

TEST_P(OptimizerOn, AStateThatWasCopiedGoesOnIdentically) {
  const auto train = [&](AdamW& optimizer, const Tensor& weight, uint64_t from, uint64_t to) {
    for (uint64_t t = from; t < to; ++t) {
      optimizer.set_lr(0.01 / double(t + 1));
      arrive(weight, Tensor::from(numbers(10 + t, 35), {5, 7}));
      optimizer.step(), optimizer.zero_grad();
    }
  };
  for (const DType dtype : {DType::f32, DType::bf16}) {
    Tensor whole = new_parameter(1, {5, 7}, dtype, device());
    AdamW straight({{"w", whole}});
    train(straight, whole, 0, 20);

    Tensor first = new_parameter(1, {5, 7}, dtype, device());
    AdamW before({{"w", first}});
    train(before, first, 0, 8);
    Tensor second = first.detach().clone();
    nn::make_parameter(second);
    AdamW after({{"w", second}});
    std::vector<Tensor> saved;
    double lr = 0;
    for_each_field(before, [&](const std::string&, auto& leaf) {
      if constexpr (std::is_same_v<std::remove_cvref_t<decltype(leaf)>, Tensor>)
        saved.push_back(leaf.clone());
      else
        lr = leaf;
    });
    size_t next = 0;
    for_each_field(after, [&](const std::string&, auto& leaf) {
      if constexpr (std::is_same_v<std::remove_cvref_t<decltype(leaf)>, Tensor>)
        leaf.copy_from(saved[next++]);
      else
        leaf = lr;
    });
    EXPECT_EQ(after.lr(), before.lr());
    train(after, second, 8, 20);
    EXPECT_EQ(second.detach().to_vector<double>(), whole.detach().to_vector<double>());
    EXPECT_EQ(after.steps(), 20);
  }
}

TEST_P(OptimizerOn, AReplayedGraphFollowsTheLearningRateAndCountsSteps) {
  const auto run = [&](bool captured) {
    Tensor weight = new_parameter(1, {4, 9}, DType::f32, device());
    AdamW optimizer({{"w", weight}});
    const Tensor gradient = Tensor::from(numbers(3, 36), {4, 9}).to(DType::f32).to(device());
    const auto body = [&] {
      Tape tape;
      Tensor y = weight.detach().clone();
      tape.record("identity", {&weight}, {&y}, [](Backward& b) { b.accumulate(0, b.grad()); });
      tape.backward(std::vector{y}, std::vector{gradient});
      optimizer.step();
      optimizer.zero_grad();
    };
    Captured step(device(), body);
    for (int t = 0; t < 6; ++t) {
      optimizer.set_lr(0.1 / (t + 1));
      if (captured)
        step();
      else
        body();
    }
    EXPECT_EQ(optimizer.steps(), 6);
    return weight.detach().to_vector<float>();
  };
  EXPECT_EQ(run(true), run(false));
}

TEST(Groups, TheNoDecayRuleLeavesOutVectorsBiasesAndNorms) {
  const auto parameter = [](const char* name, const Shape& shape) {
    return nn::NamedParameter{name, Tensor::zeros(shape, DType::f32, Device::cpu())};
  };
  EXPECT_TRUE(decays(parameter("blocks.0.up.weight", {4, 4})));
  EXPECT_FALSE(decays(parameter("blocks.0.up.bias", {4})));
  EXPECT_FALSE(decays(parameter("heads.bias", {10, 4})));
  EXPECT_FALSE(decays(parameter("blocks.0.norm1.weight", {4, 4})));
  EXPECT_FALSE(decays(parameter("scale", {})));
  for (const char* const name :
       {"norm.weight", "norm1.weight", "norms.0.weight", "ln_1.weight", "ln_f.weight", "layer_norm.weight",
        "LayerNorm.weight", "model.inputLayerNorm2.weight", "layernorm.weight", "RMSNorm.weight",
        "BatchNorm2d.weight", "q_norm.weight", "blocks.3.norm", "bias", "a.bias"})
    EXPECT_FALSE(decays(parameter(name, {4, 4}))) << name;
  for (const char* const name : {"normal_map.weight", "enormous.weight", "normalizer.weight", "Normal.weight",
                                 "kiln.weight", "lnear.weight", "bias.weight", "unbiased"})
    EXPECT_TRUE(decays(parameter(name, {4, 4}))) << name;
}

TEST(Groups, HiddenMatricesAreThoseOfNoEmbeddingAndNoHead) {
  const auto is_hidden = [](const char* name) {
    return is_hidden_matrix({name, Tensor::zeros({4, 4}, DType::f32, Device::cpu())});
  };
  for (const char* const name :
       {"token.weight", "tokens.weight", "position", "type.weight", "embed_in.weight", "embedding.weight",
        "head.weight", "heads.0.weight", "lm_head.weight", "a.classifier.dense", "language.dense.weight",
        "norm.weight"})
    EXPECT_FALSE(is_hidden(name)) << name;
  for (const char* const name :
       {"blocks.0.mlp.up.weight", "headroom.weight", "typewriter.weight", "positional.0.weight"})
    EXPECT_TRUE(is_hidden(name)) << name;
}

TEST(Groups, TheFirstThatFitsDecides) {
  std::vector<nn::NamedParameter> list;
  for (const char* name : {"body.weight", "head.weight", "head.bias", "frozen.weight"}) {
    Tensor tensor = Tensor::full({2, 2}, 1, DType::f64, Device::cpu());
    nn::make_parameter(tensor);
    list.push_back({name, tensor});
  }
  Sgd optimizer(list, {.lr = 0.5,
                       .weight_decay = 0.25,
                       .groups = {{.contains = "head", .lr_scale = 2, .weight_decay = 0.5},
                                  {.contains = "frozen", .lr_scale = 0},
                                  {.contains = "head.weight", .lr_scale = 100}}});
  optimizer.complete_gradients();
  optimizer.step();  // gradients are zero: only decay acts
  const auto value = [&](size_t i) { return list[i].tensor.detach().to_vector<double>()[3]; };
  EXPECT_EQ(value(0), 1 - 0.5 * 0.25);
  EXPECT_EQ(value(1), 1 - 1.0 * 0.5);
  EXPECT_EQ(value(2), 1 - 1.0 * 0.5);
  EXPECT_EQ(value(3), 1.0);
}

TEST(Groups, OneThatFitsNoParameterIsAnErrorUnlessItIsOptional) {
  std::vector<nn::NamedParameter> list;
  for (uint64_t i = 0; i < 7; ++i)
    list.push_back(
        {"blocks." + std::to_string(i) + ".weight", new_parameter(i, {2}, DType::f32, Device::cpu())});
  const auto make = [&](const Group& group) { AdamW(list, {.groups = {{.contains = "weight"}, group}}); };
  expect_error([&] { make({.contains = "block.", .lr_scale = 0}); },
               {"AdamW: groups[1] (contains \"block.\")", "none of the 7 parameters (blocks.0.weight, ",
                "blocks.4.weight, ...)", ".optional"});
  expect_error([&] { make({.contains = "blocks.0", .matches = decays}); },
               {"groups[1] (contains \"blocks.0\", and a function of its own)"});
  make({.contains = "block.", .lr_scale = 0, .optional = true});
  make({.contains = "blocks.6"});  // the first group that fits decides, and this one fits, too
}

TEST(Groups, ScalesAreFiniteAndNotNegative) {
  const std::vector<nn::NamedParameter> list = {{"w", new_parameter(1, {2, 2}, DType::f32, Device::cpu())}};
  const double nan = std::nan(""), infinity = std::numeric_limits<double>::infinity();
  for (const double bad : {-1.0, nan, infinity}) {
    expect_error([&] { AdamW(list, {.groups = {{.lr_scale = bad}}}); },
                 {"AdamW: groups[0] (contains \"\") has lr_scale = ", "finite and not negative"});
    expect_error([&] { Sgd(list, {.groups = {{.contains = "w", .weight_decay = bad}}}); },
                 {"Sgd: groups[0] (contains \"w\")", "weight_decay = ", "finite and not negative"});
    expect_error([&] { Muon(list, {.adamw_lr_scale = bad}); },
                 {"Muon: lr_scale of the rule adamw is ", "finite and not negative"});
  }
  AdamW(list, {.groups = {{.lr_scale = 0, .weight_decay = 0}}});
}

TEST(Optimizer, WeightsLoadedFromOutsideBecomeTheMasters) {
  Tensor weight = Tensor::full({4}, 1, DType::bf16, Device::cpu());
  nn::make_parameter(weight);
  Sgd optimizer({{"w", weight}}, {.lr = 1});
  weight.fill(3);
  optimizer.sync_masters();
  optimizer.step();
  EXPECT_EQ(weight.detach().to_vector<double>(), (std::vector<double>{3, 3, 3, 3}));
}

TEST(Optimizer, RefusesWhatItCannotTrain) {
  const auto message = [](auto&& make) {
    try {
      make();
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string("no error");
  };
  Tensor plain = Tensor::zeros({2}, DType::f32, Device::cpu());
  EXPECT_NE(message([&] { AdamW({{"plain", plain}}); }).find("plain"), std::string::npos);
  Tensor narrow = Tensor::zeros({2}, DType::bf16, Device::cpu());
  require_grad(narrow);
  EXPECT_NE(message([&] { AdamW({{"narrow", narrow}}); }).find("expected f32"), std::string::npos);
  Tensor wide = new_parameter(1, {2}, DType::f64, Device::cpu());
  Tensor single = new_parameter(1, {2}, DType::f32, Device::cpu());
  EXPECT_NE(message([&] { AdamW({{"a", wide}, {"b", single}}); }).find("f64"), std::string::npos);
  EXPECT_NE(message([&] { AdamW({{"a", single}}, {.beta1 = 1}); }).find("beta1"), std::string::npos);
  EXPECT_NE(message([&] { Sgd({{"a", single}}, {.nesterov = true}); }).find("nesterov"), std::string::npos);
  EXPECT_NE(message([&] { Sgd({{"a", single}}).set_lr(NAN); }).find("learning rate"), std::string::npos);
  EXPECT_NE(message([&] {
              AdamW({{"a", single}, {"b", single}});
            }).find("a and b are one tensor"),
            std::string::npos);
  Tensor twin = single.detach();  // as by freezing and unfreezing tied weights
  nn::make_parameter(twin);
  expect_error([&] { AdamW({{"a", single}, {"b", twin}}); }, {"a and b have their elements in one place"});
  // Parts of one tensor may be parameters, such as its rows or columns, unless they have elements in common.
  const Tensor whole = Tensor::zeros({5, 8}, DType::f32, Device::cpu());
  const auto part = [](const Tensor& view) {
    Tensor leaf = view;
    nn::make_parameter(leaf);
    return leaf;
  };
  const Tensor left = part(whole.slice(1, 0, 3)), right = part(whole.slice(1, 3, 8));
  EXPECT_NO_THROW(AdamW({{"left", left}, {"right", right}}));
  for (const Tensor& other :
       {part(whole.slice(1, 2, 5)), part(whole.slice(0, 4, 5)), part(whole.select(0, 2))})
    expect_error(
        [&] {
          AdamW({{"left", left}, {"other", other}});
        },
        {"left and other have some elements in one place"});
  Tensor shared = Tensor::zeros({1, 4}, DType::f32, Device::cpu()).expand({3, 4});
  nn::make_parameter(shared);
  EXPECT_NE(message([&] { AdamW({{"shared", shared}}); }).find("expanded"), std::string::npos);
  Tensor turned = Tensor::zeros({3, 4}, DType::f32, Device::cpu()).transpose(0, 1);
  nn::make_parameter(turned);
  EXPECT_NE(message([&] { AdamW({{"turned", turned}}); }).find("no rows"), std::string::npos);
}

TEST(Optimizer, RefusesParametersThatAreUndefinedOrShareAName) {
  const Tensor a = new_parameter(1, {4}, DType::f32, Device::cpu()),
               b = new_parameter(2, {3}, DType::f32, Device::cpu());
  expect_error([&] { AdamW({{"a", a}, {"gone", Tensor()}}); }, {"the parameter gone is undefined"});
  expect_error([&] { Sgd({{"gone", Tensor()}}); }, {"the parameter gone is undefined"});
  expect_error(
      [&] {
        AdamW({{"w", a}, {"w", b}});
      },
      {"two parameters are named w, the second f32[3]", "give each its own"});
  AdamW({{"a", a}, {"b", b}});
}

TEST(Optimizer, SaysThatALaterOneTookItsGradients) {
  for (const MissingGrad missing : {MissingGrad::zero, MissingGrad::skip}) {
    Tensor weight = new_parameter(1, {4}, DType::f32, Device::cpu());
    const std::vector<nn::NamedParameter> parameters{{"w", weight}};
    AdamW first(parameters, {.lr = 0.1, .missing = missing});
    { Sgd later(parameters, {.lr = 0.1}); }
    first.step();  // nothing arrived, which may be
    const std::vector<double> before = weight.detach().to_vector<double>();
    arrive(weight, Tensor::from(numbers(9, 4), {4}));
    expect_error([&] { first.step(); }, {"the gradient of w belongs to another optimizer"});
    expect_error([&] { first.complete_gradients(); }, {"the gradient of w belongs to another optimizer"});
    EXPECT_EQ(weight.detach().to_vector<double>(), before);
    AdamW again(parameters, {.lr = 0.1});
    again.step();
    EXPECT_NE(weight.detach().to_vector<double>(), before);
  }
}

TEST(Optimizer, RefusesARuleThatIsNullOrAsksForAnUnknownParameter) {
  struct Beyond : Rule {
    const char* name() const override { return "beyond"; }
    void begin() override { view(arena("m"), 1); }
    void step() override {}
  };
  const std::vector<nn::NamedParameter> one{{"w", new_parameter(1, {4}, DType::f32, Device::cpu())}};
  expect_error(
      [&] {
        Optimizer("mine", one, {}, {{adamw_rule(), {}}, {nullptr}});
      },
      {"mine: rule 1 is null"});
  expect_error([&] { Optimizer("mine", one, {}, {{std::make_shared<Beyond>()}}); },
               {"beyond: there is no parameter 1 of 1"});
}

TEST(Optimizer, SaysThatItWasMovedFrom) {
  Tensor weight = new_parameter(1, {4}, DType::f32, Device::cpu());
  AdamW first({{"w", weight}});
  AdamW second = std::move(first);
  expect_error([&] { first.step(); }, {"moved from"});
  expect_error([&] { first.zero_grad(); }, {"moved from"});
  second.step();
}

TEST(Optimizer, NoticesParametersThatItsModelNoLongerHas) {
  Rng rng(1);
  const auto all = [](const std::string&) { return true; };
  nn::Linear model(2, 3, rng, Device::cpu());
  const auto before = model.weight.detach().to_vector<double>();
  AdamW optimizer(nn::parameters(model), {.lr = 0.1, .weight_decay = 0.1});
  AdamW skips(nn::parameters(model), {.lr = 0.1, .weight_decay = 0.1, .missing = MissingGrad::skip});
  {
    // A copy may be frozen or converted meanwhile.
    nn::Linear copy = model;
    nn::to(copy, DType::bf16);
    nn::Linear frozen = model;
    nn::freeze(frozen, all);
    optimizer.complete_gradients();
    optimizer.step();
    skips.step();
  }
  const auto after = model.weight.detach().to_vector<double>();
  EXPECT_NE(after, before);  // by weight decay
  nn::Linear moved = model;
  nn::freeze(model, [](const std::string& name) { return name == "weight"; });
  nn::freeze(moved, all);
  // Both optimizers hold the parameters: neither can know that no model does.
  skips.step();
  skips = AdamW({{"w", new_parameter(1, {2}, DType::f32, Device::cpu())}});
  expect_error([&] { optimizer.step(); },
               {"AdamW: weight f32[3, 2]", "nn::freeze", "make the optimizer afterwards"});
  EXPECT_EQ(model.weight.detach().to_vector<double>(), after);

  nn::Linear other(2, 3, rng, Device::cpu());
  Sgd sgd(nn::parameters(other), {.lr = 0.1, .missing = MissingGrad::skip});
  nn::to(other, DType::bf16);
  expect_error([&] { sgd.step(); }, {"Sgd: weight f32[3, 2]", "nn::to was called"});
  nn::Linear third(2, 3, rng, Device::cpu());
  Sgd skipping(nn::parameters(third), {.lr = 0.1, .weight_decay = 0.1, .missing = MissingGrad::skip});
  const auto kept = third.weight.detach().to_vector<double>();
  nn::freeze(third, all);
  skipping.step();  // as parameters without a gradient
  EXPECT_EQ(third.weight.detach().to_vector<double>(), kept);
}

// PyTorch refuses it, too: steps that change nothing would look like training.
TEST(Optimizer, RefusesAModelWithoutParametersToTrain) {
  Rng rng(1);
  nn::Linear model(2, 3, rng, Device::cpu());
  nn::freeze(model, [](const std::string&) { return true; });
  expect_error([&] { AdamW optimizer(nn::parameters(model)); },
               {"AdamW: there are no parameters", "expected at least one", "all frozen"});
}

}  // namespace
}  // namespace tessera::optim
