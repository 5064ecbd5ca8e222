#include "optim/schedule.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>

#include "runtime/error.h"

namespace tessera::optim {
namespace {

TEST(Schedule, ConstantIsLambdaLrWithWarmup) {
  const Schedule rate({.kind = ScheduleKind::constant, .lr = 0.1, .warmup = 4});
  for (int t = 0; t < 20; ++t) EXPECT_DOUBLE_EQ(rate.at(t), 0.1 * std::min(1.0, (t + 1) / 4.0));
}

TEST(Schedule, LinearIsTorchsLinearLr) {
  const Schedule rate({.kind = ScheduleKind::linear, .lr = 0.1, .steps = 50, .final_factor = 0.2});
  // LinearLR(start_factor=1, end_factor=0.2, total_iters=50): base * (1 + (end - 1) t / total).
  for (int t = 0; t < 70; ++t)
    EXPECT_NEAR(rate.at(t), 0.1 * (1 + (0.2 - 1) * std::min(t, 50) / 50.0), 1e-16) << t;
}

TEST(Schedule, CosineIsTorchsCosineAnnealingAfterTheWarmup) {
  const double base = 3e-4, low = 3e-5;
  const Schedule rate({.lr = base, .steps = 110, .warmup = 10, .final_factor = 0.1});
  for (int t = 0; t < 10; ++t) EXPECT_DOUBLE_EQ(rate.at(t), base * (t + 1) / 10);
  // CosineAnnealingLR(T_max=100, eta_min=low), closed form.
  for (int t = 10; t <= 110; ++t)
    EXPECT_NEAR(rate.at(t), low + (base - low) * (1 + std::cos(M_PI * (t - 10) / 100)) / 2, 1e-18) << t;
  EXPECT_EQ(rate.at(1000), rate.at(110));
}

TEST(Schedule, WsdStaysThenFallsInAStraightLine) {
  const Schedule rate({.kind = ScheduleKind::wsd,
                       .lr = 1,
                       .steps = 100,
                       .warmup = 5,
                       .final_factor = 0.1,
                       .decay_steps = 20});
  EXPECT_DOUBLE_EQ(rate.at(0), 0.2);
  for (int t = 4; t <= 80; ++t) EXPECT_EQ(rate.at(t), 1) << t;
  for (int t = 80; t <= 100; ++t) EXPECT_NEAR(rate.at(t), 1 - 0.9 * (t - 80) / 20.0, 1e-15) << t;
  EXPECT_DOUBLE_EQ(rate.at(500), 0.1);
  // A tenth of the run by default; a run of less than ten steps has no decay.
  const Schedule tenth({.kind = ScheduleKind::wsd, .lr = 1, .steps = 100});
  EXPECT_EQ(tenth.at(90), 1);
  EXPECT_LT(tenth.at(91), 1);
  const Schedule brief({.kind = ScheduleKind::wsd, .lr = 1, .steps = 9});
  EXPECT_EQ(brief.at(8), 1);
}

TEST(Schedule, RefusesNumbersThatDoNotFit) {
  EXPECT_THROW(Schedule({.steps = 10, .warmup = 11}), Error);
  EXPECT_THROW(Schedule({.kind = ScheduleKind::wsd, .steps = 10, .warmup = 5, .decay_steps = 6}), Error);
  EXPECT_THROW(Schedule({.lr = -1, .steps = 10}), Error);
  EXPECT_THROW(Schedule({.lr = std::numeric_limits<double>::infinity(), .steps = 10}), Error);
  EXPECT_NO_THROW(Schedule({.steps = 10, .warmup = 10}));
}

TEST(Schedule, NamesRoundTripAndAMisspeltOneIsAnswered) {
  for (const auto kind :
       {ScheduleKind::constant, ScheduleKind::linear, ScheduleKind::cosine, ScheduleKind::wsd})
    EXPECT_EQ(parse_schedule(name_of(kind)), kind);
  try {
    parse_schedule("cosin");
    FAIL() << "expected an error";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("did you mean cosine"), std::string::npos) << error.what();
  }
}

}  // namespace
}  // namespace tessera::optim
