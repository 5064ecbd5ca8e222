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
  const Schedule rate({.kind = ScheduleKind::linear, .lr = 0.1, .steps = 50, .min_lr_ratio = 0.2});
  // LinearLR(start_factor=1, end_factor=0.2, total_iters=50): base * (1 + (end - 1) t / total).
  for (int t = 0; t < 70; ++t)
    EXPECT_NEAR(rate.at(t), 0.1 * (1 + (0.2 - 1) * std::min(t, 50) / 50.0), 1e-16) << t;
}

TEST(Schedule, CosineIsTorchsCosineAnnealingAfterTheWarmup) {
  const double base = 3e-4, low = 3e-5;
  const Schedule rate({.lr = base, .steps = 110, .warmup = 10, .min_lr_ratio = 0.1});
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
                       .min_lr_ratio = 0.1,
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

TEST(Schedule, CosineRestartsAreTorchsCosineAnnealingWarmRestarts) {
  const Schedule rate({.kind = ScheduleKind::cosine_restarts,
                       .lr = 0.1,
                       .steps = 65,
                       .warmup = 5,
                       .min_lr_ratio = 0.2,
                       .restarts = 2});
  for (int t = 0; t < 5; ++t) EXPECT_DOUBLE_EQ(rate.at(t), 0.1 * (t + 1) / 5);
  // CosineAnnealingWarmRestarts(T_0=20, T_mult=1, eta_min=0.02), closed form.
  for (int t = 5; t < 65; ++t)
    EXPECT_NEAR(rate.at(t), 0.02 + 0.08 * (1 + std::cos(M_PI * ((t - 5) % 20) / 20.0)) / 2, 1e-15) << t;
  EXPECT_NEAR(rate.at(65), 0.02, 1e-15);
  EXPECT_EQ(rate.at(900), rate.at(65));
}

TEST(Schedule, CyclesThatDoNotDivideTheRunCoverIt) {
  for (const int steps : {41, 42, 43, 44, 101}) {
    const Schedule rate({.kind = ScheduleKind::cosine_restarts,
                         .lr = 1,
                         .steps = steps,
                         .warmup = 1,
                         .restarts = 3,
                         .restart_warmup = 2});
    // A restart is where the rate rises, after a fall to almost nothing: from 0 at its warm-up's beginning.
    int restarts = 0;
    for (int t = 2; t < steps; ++t) {
      if (rate.at(t) <= rate.at(t - 1) || t == 2) continue;
      EXPECT_DOUBLE_EQ(rate.at(t), 0.5) << steps << " " << t;
      EXPECT_DOUBLE_EQ(rate.at(t + 1), 1) << steps << " " << t;
      EXPECT_EQ(t, 1 + (restarts + 1) * (steps - 1) / 4) << steps;
      restarts += 1, t += 2;
    }
    EXPECT_EQ(restarts, 3) << steps;
  }
}

TEST(Schedule, CosineWarmupsClimbBackToOneCosine) {
  const Schedule whole({.lr = 0.1, .steps = 104, .warmup = 4, .min_lr_ratio = 0.1});
  const Schedule rate({.kind = ScheduleKind::cosine_warmups,
                       .lr = 0.1,
                       .steps = 104,
                       .warmup = 4,
                       .min_lr_ratio = 0.1,
                       .restarts = 3,
                       .restart_warmup = 5});
  for (int t = 0; t < 110; ++t) {
    const int since = t < 29 ? 5 : (t - 4) % 25;
    const double climb = t < 104 && since < 5 ? (since + 1) / 5.0 : 1;
    EXPECT_NEAR(rate.at(t), climb * whole.at(t), 1e-16) << t;
  }
}

TEST(Schedule, RefusesRestartsThatDoNotFit) {
  const auto message = [](const ScheduleOptions& options) {
    try {
      Schedule made(options);
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  const auto kind = ScheduleKind::cosine_restarts, other = ScheduleKind::cosine_warmups;
  EXPECT_NE(message({.steps = 10, .restarts = 1}).find("\"cosine\" has none"), std::string::npos);
  EXPECT_NE(message({.steps = 10, .restart_warmup = 1}).find("\"cosine\" has none"), std::string::npos);
  EXPECT_NE(message({.kind = kind, .steps = 10}).find("--restarts"), std::string::npos);
  EXPECT_NE(message({.kind = kind, .steps = 10, .restarts = -1}).find("negative"), std::string::npos);
  EXPECT_NE(message({.kind = kind, .steps = 10, .restarts = 10}).find("cycles of 0"), std::string::npos);
  EXPECT_NE(message({.kind = kind, .steps = 10, .restarts = 1, .restart_warmup = 5}).find("cycles of 5"),
            std::string::npos);
  EXPECT_NE(message({.kind = other, .steps = 10, .restarts = 1}).find("--restart-warmup"), std::string::npos);
  EXPECT_EQ(message({.kind = kind, .steps = 10, .restarts = 9}), "");
  EXPECT_EQ(message({.kind = other, .steps = 10, .restarts = 1, .restart_warmup = 4}), "");
}

TEST(Schedule, RefusesNumbersThatDoNotFit) {
  EXPECT_THROW(Schedule({.steps = 10, .warmup = 11}), Error);
  EXPECT_THROW(Schedule({.kind = ScheduleKind::wsd, .steps = 10, .warmup = 5, .decay_steps = 6}), Error);
  EXPECT_THROW(Schedule({.lr = -1, .steps = 10}), Error);
  EXPECT_THROW(Schedule({.lr = std::numeric_limits<double>::infinity(), .steps = 10}), Error);
  EXPECT_NO_THROW(Schedule({.steps = 10, .warmup = 10}));
  // Without its length a falling rate would be 0 in every step.
  EXPECT_THROW(Schedule({.lr = 1e-3}), Error);
  for (const int64_t warmup : {0, 3}) EXPECT_THROW(Schedule({.steps = 10, .warmup = warmup}).at(-1), Error);
  EXPECT_NO_THROW(Schedule({.kind = ScheduleKind::constant, .lr = 1e-3}));
}

TEST(Schedule, NamesRoundTripAndAMisspeltOneIsAnswered) {
  for (const auto kind : {ScheduleKind::constant, ScheduleKind::linear, ScheduleKind::cosine,
                          ScheduleKind::wsd, ScheduleKind::cosine_restarts, ScheduleKind::cosine_warmups})
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
