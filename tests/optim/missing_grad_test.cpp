#include <gtest/gtest.h>

#include <limits>

#include "autograd/tape.h"
#include "ops/cast/cast.h"
#include "ops/pointwise/pointwise.h"
#include "ops/random/random.h"
#include "ops/reduce/reduce.h"
#include "optim/bundled.h"
#include "runtime/rng.h"
#include "tests/errors.h"
#include "tests/nn/no_recorder.h"
#include "tests/tensors.h"

namespace tessera::optim {
namespace {

Tensor parameter_of(uint64_t seed, DType dtype) {
  Rng rng(seed);
  Tensor values = Tensor::empty({5, 7}, DType::f32, kCpu);
  ops::fill_uniform(values, -1, 1, rng);
  Tensor parameter = values.to(dtype).clone();
  nn::make_parameter(parameter);
  return parameter;
}

/// Gradients of some parameters, which depend on the step and on the parameter.
void run_backward(Optimizer& optimizer, const std::vector<Tensor>& reached, int step, double factor = 1) {
  if (reached.empty()) return;
  Tape tape({.loss_scale = optimizer.loss_scale()});
  Tensor loss;
  for (const Tensor& parameter : reached) {
    const Tensor wide = parameter.dtype() == DType::f32 ? parameter : ops::cast(parameter, DType::f32);
    const Tensor square = ops::scale(ops::sum(ops::mul(wide, wide)), factor * (0.3 + 0.1 * step));
    loss = loss.defined() ? ops::add(loss, square) : square;
  }
  tape.backward(loss);
}

void run_step(Optimizer& optimizer, const std::vector<Tensor>& reached, int step, double factor = 1) {
  run_backward(optimizer, reached, step, factor);
  optimizer.step();
  optimizer.zero_grad();
}

std::vector<float> values_of(const Tensor& tensor) {
  return tensor.detach().to(DType::f32).to_vector<float>();
}

BundledOptions options_of(MissingGrad missing) {
  return {.lr = 0.05, .weight_decay = 0.1, .momentum = 0.9, .missing = missing};
}

struct MissingGradCase {
  const char* optimizer;
  DType dtype;
};
class MissingGradients : public ::testing::TestWithParam<MissingGradCase> {};

/// As PyTorch has it: a parameter knows only of the steps in which its gradient arrived.
TEST_P(MissingGradients, SkippedParametersAreThoseOfAnOptimizerOfTheirOwn) {
  const auto [name, dtype] = GetParam();
  const Tensor a = parameter_of(1, dtype), b = parameter_of(2, dtype), alone = parameter_of(2, dtype);
  Optimizer both = make_optimizer(name, {{"a.weight", a}, {"b.weight", b}}, options_of(MissingGrad::skip));
  Optimizer other = make_optimizer(name, {{"b.weight", alone}}, options_of(MissingGrad::zero));
  for (int step = 0; step < 9; ++step) {
    const bool arrives = step == 3 || step == 4 || step == 7;
    const std::vector<float> before = values_of(b);
    run_step(both, arrives ? std::vector<Tensor>{a, b} : std::vector<Tensor>{a}, step);
    if (arrives)
      run_step(other, {alone}, step);
    else
      EXPECT_EQ(values_of(b), before) << step;
    EXPECT_EQ(values_of(b), values_of(alone)) << step;
  }
  EXPECT_EQ(both.steps(), 9);
  EXPECT_EQ(both.skipped(), 0);
}

TEST_P(MissingGradients, ThatAllArriveChangeNoBit) {
  const auto [name, dtype] = GetParam();
  std::vector<std::vector<float>> ends;
  for (const MissingGrad missing : {MissingGrad::zero, MissingGrad::skip}) {
    const Tensor a = parameter_of(1, dtype), b = parameter_of(2, dtype);
    Optimizer optimizer = make_optimizer(name, {{"a.weight", a}, {"b.weight", b}}, options_of(missing));
    for (int step = 0; step < 5; ++step) run_step(optimizer, {a, b}, step);
    ends.push_back(values_of(a));
    EXPECT_EQ(optimizer.missing(), missing);
  }
  EXPECT_EQ(ends[0], ends[1]);
}

TEST_P(MissingGradients, AsZeroStillDecay) {
  const auto [name, dtype] = GetParam();
  const Tensor a = parameter_of(1, dtype), b = parameter_of(2, dtype);
  Optimizer optimizer =
      make_optimizer(name, {{"a.weight", a}, {"b.weight", b}}, options_of(MissingGrad::zero));
  const std::vector<float> before = values_of(b);
  for (int step = 0; step < 3; ++step) run_step(optimizer, {a}, step);
  EXPECT_NE(values_of(b), before);
}

TEST_P(MissingGradients, OfAllParametersSkipTheStep) {
  const auto [name, dtype] = GetParam();
  for (const MissingGrad missing : {MissingGrad::skip, MissingGrad::zero}) {
    const Tensor a = parameter_of(1, dtype);
    Optimizer optimizer = make_optimizer(name, {{"a.weight", a}}, options_of(missing));
    run_step(optimizer, {a}, 0);
    const std::vector<float> before = values_of(a);
    run_step(optimizer, {}, 1);
    EXPECT_EQ(values_of(a), before);
    EXPECT_EQ(optimizer.steps(), 1);
    EXPECT_EQ(optimizer.skipped(), 1);
    run_step(optimizer, {a}, 2);
    EXPECT_EQ(optimizer.steps(), 2);
    EXPECT_NE(values_of(a), before);
  }
}

/// What a program calls complete is its gradient, if it is zero, too.
TEST_P(MissingGradients, ThatAreCompletedAreNoneMissing) {
  const auto [name, dtype] = GetParam();
  const Tensor a = parameter_of(1, dtype);
  Optimizer optimizer = make_optimizer(name, {{"a.weight", a}}, options_of(MissingGrad::zero));
  const std::vector<float> before = values_of(a);
  optimizer.complete_gradients();
  optimizer.step();
  EXPECT_NE(values_of(a), before);  // decayed
  EXPECT_EQ(optimizer.steps(), 1);
  optimizer.zero_grad();
  optimizer.step();
  EXPECT_EQ(optimizer.skipped(), 1);
}

/// Of three micro-batches the gradient arrives in one alone: that is an arrival.
TEST_P(MissingGradients, AccumulateOverMicroBatches) {
  const auto [name, dtype] = GetParam();
  std::vector<std::vector<float>> ends;
  for (const MissingGrad missing : {MissingGrad::zero, MissingGrad::skip}) {
    const Tensor a = parameter_of(1, dtype), b = parameter_of(2, dtype);
    Optimizer optimizer = make_optimizer(name, {{"a.weight", a}, {"b.weight", b}}, options_of(missing));
    for (int step = 0; step < 3; ++step) {
      run_backward(optimizer, {a}, step);
      run_backward(optimizer, {a, b}, step);
      run_step(optimizer, {a}, step);
    }
    ends.push_back(values_of(b));
  }
  EXPECT_EQ(ends[0], ends[1]);
}

/// The norm is that of the gradients that arrived, so that what a skipped one was in an earlier step does not
/// clip the others.
TEST_P(MissingGradients, ThatAreSkippedDoNotClipTheOthers) {
  const auto [name, dtype] = GetParam();
  const Tensor a = parameter_of(1, dtype), b = parameter_of(2, dtype), alone = parameter_of(1, dtype);
  BundledOptions options = options_of(MissingGrad::skip);
  options.max_grad_norm = 0.5;
  Optimizer both = make_optimizer(name, {{"a.weight", a}, {"b.weight", b}}, options);
  Optimizer other = make_optimizer(name, {{"a.weight", alone}}, options);
  run_step(both, {b}, 0, 100);
  EXPECT_GT(both.grad_norm(), 100);
  EXPECT_EQ(values_of(a), values_of(alone));
  for (int step = 1; step < 3; ++step) {
    run_step(both, {a}, step);
    run_step(other, {alone}, step);
    EXPECT_GT(both.grad_norm(), options.max_grad_norm);
    EXPECT_EQ(both.grad_norm(), other.grad_norm());
    EXPECT_EQ(values_of(a), values_of(alone));
  }
}

INSTANTIATE_TEST_SUITE_P(Rules, MissingGradients,
                         ::testing::Values(MissingGradCase{"adamw", DType::f32},
                                           MissingGradCase{"adamw", DType::bf16},
                                           MissingGradCase{"sgd", DType::f32}),
                         [](const auto& info) {
                           return std::string(info.param.optimizer) + "_" + name_of(info.param.dtype);
                         });

/// A graph knows which gradients its body computes. Where one that was missing has arrived before a replay,
/// the body is captured once more.
TEST(MissingGradientsSkip, CapturedAgainWhereAnotherGradientArrives) {
  const Tensor a = parameter_of(1, DType::f32), b = parameter_of(2, DType::f32);
  AdamW optimizer({{"a", a}, {"b", b}}, {.missing = MissingGrad::skip});
  Captured step(
      kCpu, [&] { run_step(optimizer, {a}, 0); }, std::make_unique<nn::NoRecorder>());
  for (int i = 0; i < 4; ++i) step();
  EXPECT_EQ(step.graphs(), 1u);
  run_backward(optimizer, {b}, 0);
  step();
  EXPECT_EQ(step.graphs(), 2u);
  step();
  EXPECT_EQ(step.graphs(), 2u);
}

std::vector<int64_t> parameter_steps(Optimizer& optimizer) {
  std::vector<int64_t> steps;
  optimizer.fields([&]<class T>(const std::string& name, T& field) {
    if constexpr (std::is_same_v<T, Tensor>)
      if (name == "parameter_steps") steps = field.template to_vector<int64_t>();
  });
  return steps;
}

TEST(MissingGradientsSkip, StepsOfAParameterAreStateAndAnOverflowIsNone) {
  const Tensor a = parameter_of(1, DType::f32), b = parameter_of(2, DType::f32);
  AdamW optimizer({{"a", a}, {"b", b}}, {.missing = MissingGrad::skip});
  run_step(optimizer, {a, b}, 0);
  run_step(optimizer, {a}, 1);
  run_step(optimizer, {a, b}, 2, std::numeric_limits<double>::infinity());
  run_step(optimizer, {a}, 3);
  EXPECT_EQ(parameter_steps(optimizer), (std::vector<int64_t>{3, 1}));
  EXPECT_EQ(optimizer.steps(), 3);
  EXPECT_EQ(optimizer.skipped(), 1);
  AdamW zero({{"a", a}, {"b", b}}, {});
  EXPECT_TRUE(parameter_steps(zero).empty());
}

TEST(MissingGradientsSkip, RefuseWhereTheyCannotBeSkipped) {
  const Tensor a = parameter_of(1, DType::f32);
  const auto refused = [&](const char* name, BundledOptions options) {
    options.missing = MissingGrad::skip;
    return message_of([&] { make_optimizer(name, {{"blocks.0.a.weight", a}}, options); });
  };
  for (const char* name : {"muon", "galore"})
    EXPECT_NE(refused(name, {.galore = {.rank = 2}}).find("--missing-grad zero"), std::string::npos) << name;
  EXPECT_NE(refused("adamw", {.momentum_reset = 5}).find("without restarts"), std::string::npos);
  EXPECT_NE(refused("adamw", {.sharding = {.part = 0, .parts = 2}}).find("on one rank"), std::string::npos);
  AdamW optimizer({{"a", a}}, {.missing = MissingGrad::skip});
  EXPECT_NE(message_of([&] { optimizer.on_gradients([](const Tensor&) {}); }).find("MissingGrad::zero"),
            std::string::npos);
  EXPECT_NE(message_of([] { parse_missing_grad("none"); }).find("zero or skip"), std::string::npos);
}

}  // namespace
}  // namespace tessera::optim
