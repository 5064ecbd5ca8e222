#include "optim/loss_scale.h"

#include <cmath>
#include <limits>

#include "gradients.h"
#include "ops/pointwise/pointwise.h"
#include "ops/reduce/reduce.h"
#include "optim/adamw.h"
#include "optim/sgd.h"
#include "runtime/capture.h"
#include "tests/errors.h"

namespace tessera::optim {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

class LossScaling : public OnDevice {};
INSTANTIATE_TEST_SUITE_P(Device, LossScaling, testing::Values("cpu", "cuda"));

/// What a backward pass that begins with the optimizer's scale leaves for a gradient that is the same number
/// everywhere.
void arrive_scaled(const Optimizer& optimizer, const Tensor& leaf, double gradient) {
  const double scaled = gradient * optimizer.loss_scale().item();
  arrive(leaf, Tensor::full(leaf.shape(), scaled, DType::f32, Device::cpu()), optimizer.loss_scale());
}

TEST_P(LossScaling, StepsHaveTheBitsOfStepsWithoutIt) {
  for (const double max_grad_norm : {0.0, 0.5}) {
    const auto train = [&](const std::optional<LossScale>& loss_scale) {
      Tensor weight = new_parameter(1, {5, 7}, DType::f16, device());
      AdamW optimizer({{"w", weight}},
                      {.lr = 0.01, .max_grad_norm = max_grad_norm, .loss_scale = loss_scale});
      std::vector<double> result;
      for (uint64_t t = 0; t < 10; ++t) {
        const double scale = loss_scale ? optimizer.loss_scale().item() : 1;
        std::vector<double> gradient = numbers(10 + t, 35);
        for (double& value : gradient) value = double(float(value)) * scale;
        // Through an f32 tensor: an f16 one would lose the digits.
        Tape tape({.loss_scale = optimizer.loss_scale()});
        Tensor y = Tensor::zeros({5, 7}, DType::f32, device());
        tape.record("identity", {&weight}, {&y}, [](Backward& b) { b.accumulate(0, b.grad()); });
        tape.backward(std::vector{y},
                      std::vector{Tensor::from(gradient, {5, 7}).to(DType::f32).to(device())});
        optimizer.step(), optimizer.zero_grad();
        result.push_back(optimizer.grad_norm());
      }
      for_each_field(optimizer, [&](const std::string& name, auto& leaf) {
        if constexpr (std::is_same_v<std::remove_cvref_t<decltype(leaf)>, Tensor>)
          if (!name.starts_with("loss_scale"))
            for (const double value : leaf.template to_vector<double>()) result.push_back(value);
      });
      for (const double value : weight.detach().to_vector<double>()) result.push_back(value);
      return result;
    };
    // The scale rises from 2^10 to 2^13 on the way.
    EXPECT_EQ(train(LossScale{.initial = 0x1p10, .interval = 3}), train({})) << max_grad_norm;
  }
}

TEST_P(LossScaling, RisesAfterGoodStepsAndFallsAfterEachBadOne) {
  Tensor weight = Tensor::full({3}, 1, DType::f16, device());
  nn::make_parameter(weight);
  Sgd optimizer({{"w", weight}},
                {.lr = 1,
                 .loss_scale = LossScale{
                     .initial = 8, .growth = 4, .backoff = 0.5, .interval = 3, .minimum = 2, .maximum = 64}});
  struct Expected {
    bool good;
    double scale;  // after the step
    int64_t skipped, at_minimum;
  };
  const Expected course[] = {{true, 8, 0, 0},   {true, 8, 0, 0},   {true, 32, 0, 0},   // three in a row
                             {true, 32, 0, 0},  {true, 32, 0, 0},  {false, 16, 1, 0},  // the row begins again
                             {true, 16, 1, 0},  {true, 16, 1, 0},  {true, 64, 1, 0},  {true, 64, 1, 0},
                             {true, 64, 1, 0},  {true, 64, 1, 0},  // no higher than the maximum
                             {false, 32, 2, 0}, {false, 16, 3, 0}, {false, 8, 4, 0},  {false, 4, 5, 0},
                             {false, 2, 6, 0},  {false, 2, 7, 1},  {false, 2, 8, 2},  {true, 2, 8, 2}};
  int64_t steps = 0;
  for (const Expected& expected : course) {
    const std::vector<double> before = weight.detach().to_vector<double>();
    arrive_scaled(optimizer, weight, expected.good ? 1.0 / 64 : kInfinity);
    optimizer.step(), optimizer.zero_grad();
    steps += 1;
    EXPECT_EQ(optimizer.loss_scale().item(), expected.scale) << "step " << steps;
    EXPECT_EQ(optimizer.skipped(), expected.skipped) << "step " << steps;
    EXPECT_EQ(optimizer.skipped_at_minimum(), expected.at_minimum) << "step " << steps;
    EXPECT_EQ(optimizer.steps(), steps - expected.skipped);
    if (expected.good) {
      EXPECT_EQ(optimizer.grad_norm(), std::sqrt(3.0) / 64);
      EXPECT_EQ(weight.detach().to_vector<double>()[0], before[0] - 1.0 / 64);
    } else {
      EXPECT_EQ(weight.detach().to_vector<double>(), before);
    }
  }
}

TEST_P(LossScaling, AReplayedGraphFollowsTheScale) {
  const auto run = [&](bool captured) {
    Tensor weight = Tensor::full({4}, 1, DType::f16, device());
    nn::make_parameter(weight);
    AdamW optimizer({{"w", weight}}, {.lr = 0.01, .loss_scale = LossScale{.initial = 0x1p10, .interval = 2}});
    const Tensor factor = Tensor::full({4}, 1, DType::f16, device());
    const auto body = [&] {
      Tape tape({.loss_scale = optimizer.loss_scale()});
      tape.backward(ops::mean(ops::mul(weight, factor)));
      optimizer.step();
      optimizer.zero_grad();
    };
    Captured step(device(), body);
    std::vector<double> course;
    for (int t = 0; t < 9; ++t) {
      // 2^15 times a fourth of the scale is beyond f16 for scales above 2^3: these two steps overflow.
      factor.fill(t == 4 || t == 5 ? 0x1p15 : 1.0 / (t + 1));
      captured ? step() : body();
      course.push_back(optimizer.loss_scale().item());
      course.push_back(optimizer.grad_norm());
      course.push_back(weight.detach().to_vector<double>()[0]);
    }
    EXPECT_EQ(optimizer.skipped(), 2);
    EXPECT_EQ(optimizer.loss_scale().item(), 0x1p11);  // 2^10 up twice, down twice, up once
    for (double& value : course)
      if (!std::isfinite(value)) value = -1;
    return course;
  };
  EXPECT_EQ(run(true), run(false));
}

TEST_P(LossScaling, IsPartOfTheStateOnlyWhereItIsUsed) {
  const auto names = [&](const std::optional<LossScale>& loss_scale) {
    Tensor weight = new_parameter(1, {2}, DType::f16, device());
    Sgd optimizer({{"w", weight}}, {.loss_scale = loss_scale});
    std::vector<std::string> list;
    for_each_field(optimizer, [&](const std::string& name, auto&) { list.push_back(name); });
    return list;
  };
  EXPECT_EQ(names({}), (std::vector<std::string>{"lr", "counts", "master.w"}));
  EXPECT_EQ(names(LossScale{}),
            (std::vector<std::string>{"lr", "counts", "loss_scale", "loss_scale_counts", "master.w"}));
}

TEST(LossScale, OtherNumbersLeaveAScaleThatIsInUse) {
  Tensor weight = new_parameter(1, {2}, DType::f16, Device::cpu());
  Sgd optimizer({{"w", weight}}, {.loss_scale = LossScale{}}),
      plain({{"w", new_parameter(1, {2}, DType::f32, Device::cpu())}});
  optimizer.set_loss_scale({.initial = 16, .interval = 1});
  EXPECT_EQ(optimizer.loss_scale().item(), 16);
  optimizer.complete_gradients();
  optimizer.step();
  EXPECT_EQ(optimizer.loss_scale().item(), 32);
  optimizer.set_loss_scale({.initial = 4, .interval = 2});
  EXPECT_EQ(optimizer.loss_scale().item(), 32);
  expect_error([&] { optimizer.set_loss_scale({.initial = 3}); }, {"loss_scale.initial is 3"});
  expect_error([&] { plain.set_loss_scale({}); }, {"without loss scaling"});
}

TEST_P(LossScaling, AStepRefusesGradientsOfABackwardPassWithoutTheScale) {
  Tensor weight = Tensor::full({2}, 1, DType::f16, device());
  nn::make_parameter(weight);
  Sgd optimizer({{"w", weight}}, {.lr = 1, .loss_scale = LossScale{.initial = 8}});
  const auto backward = [&](const Tensor& scale) {
    Tape tape({.loss_scale = scale});
    tape.backward(ops::mean(weight));
  };
  for (int t = 0; t < 2; ++t) {
    backward({});
    expect_error([&] { optimizer.step(); }, {"Sgd", "loss scale", "Tape tape({"});
    optimizer.zero_grad();
    EXPECT_EQ(weight.detach().to_vector<double>()[0], t == 0 ? 1 : 0.5);
    backward(optimizer.loss_scale());
    optimizer.step(), optimizer.zero_grad();
  }
  optimizer.step();  // nothing has arrived: no gradient can be wrong
  // A captured backward pass, with the step outside: replays count.
  Captured captured(device(), [&] { backward(optimizer.loss_scale()); });
  for (int t = 0; t < 4; ++t) {
    captured();
    optimizer.step(), optimizer.zero_grad();
  }
  EXPECT_EQ(optimizer.steps(), 6);
  EXPECT_EQ(optimizer.skipped(), 1);
}

TEST(LossScale, IsTheDefaultOfF16Alone) {
  EXPECT_TRUE(default_loss_scale(DType::f16));
  for (const DType dtype : {DType::f32, DType::f64, DType::bf16}) EXPECT_FALSE(default_loss_scale(dtype));
}

TEST(LossScale, RefusesNumbersThatWouldRoundOrNeverMove) {
  Tensor weight = new_parameter(1, {2}, DType::f16, Device::cpu());
  const auto refused = [&](const LossScale& options) {
    return message_of([&] { Sgd({{"w", weight}}, {.loss_scale = options}); });
  };
  EXPECT_EQ(refused({}), "");
  EXPECT_NE(refused({.initial = 1000}).find("Sgd: loss_scale.initial is 1000; expected a power of two"),
            std::string::npos);
  EXPECT_NE(refused({.backoff = 0.3}).find("loss_scale.backoff"), std::string::npos);
  EXPECT_NE(refused({.backoff = 1}).find("less than 1"), std::string::npos);
  EXPECT_NE(refused({.interval = 0}).find("interval = 0"), std::string::npos);
  EXPECT_NE(refused({.minimum = 0}).find("loss_scale.minimum is 0"), std::string::npos);
  EXPECT_NE(refused({.initial = 2, .minimum = 4}).find("from minimum = 4"), std::string::npos);
  EXPECT_NE(refused({.maximum = kInfinity}).find("loss_scale.maximum is inf"), std::string::npos);
}

}  // namespace
}  // namespace tessera::optim
