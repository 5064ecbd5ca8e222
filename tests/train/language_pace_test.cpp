#include "train/language_pace.h"

#include "tests/train/small_language.h"

namespace tessera::train {
namespace {

TEST(LanguageTraining, StepsFitTheirTime) {
  LanguageSettings job = small_language_job();
  const int64_t few = steps_within(job, Device::cpu(), 0.5), many = steps_within(job, Device::cpu(), 500);
  EXPECT_GE(few, 1);
  EXPECT_GT(many, 100);
}

TEST(LanguageTraining, WhatTheOptimizerDoesNowAndThenHasItsShareOfTheTime) {
  LanguageSettings job = small_language_job();
  EXPECT_TRUE(periods_of(job).empty());
  job.optimizer = "galore", job.galore_rank = 2;
  EXPECT_EQ(periods_of(job), std::vector{&TrainingSettings::galore_every});
  EXPECT_GE(steps_within(job, Device::cpu(), 0.5), 1);
  job.optimizer = "loro";
  EXPECT_EQ(periods_of(job), std::vector{&TrainingSettings::loro_every});
  job.loro_every = 0, job.refactor_every = 7;
  EXPECT_EQ(periods_of(job), std::vector{&TrainingSettings::refactor_every});
}

}  // namespace
}  // namespace tessera::train
