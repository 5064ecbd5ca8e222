#include "train/trainer.h"

#include <cmath>
#include <csignal>
#include <cstring>
#include <optional>

#include "autograd/tape.h"
#include "io/checkpoint_folder.h"
#include "io/events.h"
#include "ops/dropout/dropout.h"
#include "ops/pointwise/pointwise.h"
#include "ops/reduce/reduce.h"
#include "runtime/interrupt.h"
#include "tests/errors.h"
#include "tests/folder.h"
#include "tests/train/regression.h"
#include "train/due.h"
#include "train/step.h"

namespace tessera::train {
namespace {

namespace fs = std::filesystem;

using test::kRows;
using test::options_of;
using test::Ran;
using test::Regression;

TEST(Trainer, ARunThatMayNotSaveEndsBeforeItsFirstStep) {
  const TemporaryFolder root;
  fs::permissions(root.path(), fs::perms::all);
  const UnprivilegedUser user;
  const RunFolder run = RunFolder::create(root.path(), "r");
  fs::permissions(run.checkpoints(), fs::perms::owner_read | fs::perms::owner_exec);
  Regression regression(1);
  report::Progress progress(report::Progress::Mode::quiet);
  const std::string said = message_of([&] { train(regression, run, options_of(6), progress); });
  EXPECT_NE(said.find("checkpoints is read-only for this user"), std::string::npos) << said;
  EXPECT_EQ(regression.begun, 0);
  fs::permissions(run.checkpoints(), fs::perms::owner_all);
}

TEST(Trainer, OptionsOutOfRangeAreRefused) {
  const auto said = [](auto set) {
    Regression regression(1);
    TrainerOptions options = options_of(2);
    set(options);
    const std::string error = train(regression, options).error;
    EXPECT_EQ(regression.begun, 0);
    return error;
  };
  EXPECT_EQ(said([](TrainerOptions& o) { o.steps = -1; }), "train: steps is -1; expected 0 or more");
  EXPECT_EQ(said([](TrainerOptions& o) { o.log_every = 0; }),
            "train: log_every (--log-every) is 0; expected 1 to 1073741824");
  EXPECT_EQ(said([](TrainerOptions& o) { o.save_every = -5; }),
            "train: save_every (--save-every) is -5; expected 0 to 1073741824");
  EXPECT_EQ(said([](TrainerOptions& o) { o.keep = 0; }), "train: keep (--keep) is 0; expected 1 to 1048576");
}

TEST(Trainer, AccumulatedMicroBatchesAreOneLargeBatch) {
  Regression large(1), small(4);
  const Ran a = train(large, options_of(20)), b = train(small, options_of(20));
  ASSERT_EQ(a.error + b.error, "");
  const auto one = large.weights(), four = small.weights();
  // f64: sums of 12 numbers in another order differ by some 1e-16 of gradients near 1. AdamW divides by the
  // root of the second moment, which keeps relative errors; 20 steps of 1e-2 leave less than 1e-14.
  for (size_t i = 0; i < one.size(); ++i) EXPECT_NEAR(one[i], four[i], 1e-13);
  ASSERT_EQ(a.metrics.size(), 20u);
  ASSERT_EQ(b.metrics.size(), 20u);
  for (size_t i = 0; i < 20; ++i) {
    // The loss is kept in f32: the mean of four is rounded eight times more.
    EXPECT_NEAR(a.metrics[i].values.at("loss"), b.metrics[i].values.at("loss"), 1e-6);
    EXPECT_NEAR(a.metrics[i].values.at("grad_norm"), b.metrics[i].values.at("grad_norm"), 1e-13);
  }
  EXPECT_LT(a.metrics.back().values.at("loss"), 0.9 * a.metrics.front().values.at("loss"));
}

TEST(Trainer, LogsTheFirstTheLastAndEveryNth) {
  Regression regression(1);
  TrainerOptions options = options_of(23);
  options.log_every = 10;
  options.save_every = 8;
  options.schedule = optim::Schedule({.kind = optim::ScheduleKind::linear, .lr = 1e-2, .steps = 23});
  const Ran ran = train(regression, options);
  std::vector<int64_t> steps;
  for (const StepRecord& record : ran.metrics) {
    steps.push_back(record.step);
    EXPECT_EQ(record.values.at("lr"), options.schedule->at(record.step - 1));
  }
  EXPECT_EQ(steps, (std::vector<int64_t>{1, 10, 20, 23}));
  EXPECT_EQ(regression.saved, (std::vector<int64_t>{8, 16, 23}));
  EXPECT_EQ(ran.result.step, 23);
  EXPECT_EQ(ran.result.outcome, Outcome::finished);
  EXPECT_EQ(ran.result.loss, ran.metrics.back().values.at("loss"));
}

TEST(Trainer, SamplesWhenAskedAndAtTheEnd) {
  Regression regression(1);
  std::vector<int64_t> sampled;
  regression.on_sample = [&](int64_t step) {
    EXPECT_EQ(Tape::recording(regression.layer.weight), nullptr);
    sampled.push_back(step);
  };
  TrainerOptions options = options_of(20);
  options.log_every = 100, options.sample_every = 8;
  const Ran ran = train(regression, options);
  EXPECT_EQ(sampled, (std::vector<int64_t>{8, 16, 20}));
  EXPECT_EQ(ran.metrics.size(), 4u);  // the first step, and each that was sampled
}

TEST(Trainer, EvaluatesWhenAskedAndAtTheEnd) {
  Regression regression(1);
  int evaluations = 0;
  regression.on_evaluate = [&] {
    EXPECT_FALSE(Tape::recording(regression.layer.weight));
    return std::map<std::string, double>{{"eval_nll", ++evaluations}};
  };
  TrainerOptions options = options_of(10);
  options.log_every = 100;
  options.eval_every = 4;
  const Ran ran = train(regression, options);
  std::vector<int64_t> steps;
  for (const StepRecord& record : ran.metrics)
    if (record.values.contains("eval_nll")) steps.push_back(record.step);
  EXPECT_EQ(steps, (std::vector<int64_t>{4, 8, 10}));
  EXPECT_EQ(ran.result.evaluation.at("eval_nll"), 3);
}

class NonFinite : public ::testing::TestWithParam<double> {};

TEST_P(NonFinite, LossLeavesTheWeightsAndStopsTheRun) {
  Regression regression(1);
  std::vector<double> before;
  regression.before_step = [&](int64_t step) {
    if (step != 4) return;
    before = regression.weights();
    regression.factor = GetParam();
  };
  TrainerOptions options = options_of(50);
  options.save_every = 100;
  const Ran ran = train(regression, options);
  const auto after = regression.weights();
  ASSERT_EQ(before.size(), after.size());
  EXPECT_EQ(std::memcmp(before.data(), after.data(), before.size() * sizeof(double)), 0);
  EXPECT_EQ(regression.begun, 3 + options.most_skips);
  for (const char* part : {"not finite for 5 steps", "up to step 8", "checkpoints", "--check-finite",
                           "TrainerOptions::check_finite", "learning rate"})
    EXPECT_NE(ran.error.find(part), std::string::npos) << part << " in: " << ran.error;
  EXPECT_EQ(regression.saved, std::vector<int64_t>{8});  // the weights of step 3, which are sound
  EXPECT_TRUE(std::isnan(ran.metrics.back().values.at("loss")));
}
INSTANTIATE_TEST_SUITE_P(Factors, NonFinite,
                         ::testing::Values(std::nan(""), std::numeric_limits<double>::infinity()));

TEST(Trainer, TheCurveDoesNotTellWhereARunWasResumed) {
  Regression regression(1);
  TrainerOptions options = options_of(20);
  options.log_every = 6;
  std::vector<int64_t> steps;
  for (const StepRecord& record : train(regression, options, 8).metrics) steps.push_back(record.step);
  EXPECT_EQ(steps, (std::vector<int64_t>{12, 18, 20}));  // not 9, the first
}

TEST(Trainer, ASkippedStepAmongGoodOnesDoesNotStopTheRun) {
  for (const int64_t log_every : {1, 10}) {
    Regression regression(1);
    // Steps 10, 20, ... are bad: the very ones that are logged, and nothing is known of those between.
    regression.before_step = [&](int64_t step) { regression.factor = step % 10 == 0 ? std::nan("") : 1; };
    TrainerOptions options = options_of(65);
    options.log_every = log_every;
    EXPECT_EQ(train(regression, options).error, "") << log_every;
  }
}

TEST(Trainer, ARunThatEndsInNanHasDivergedButOneBadLastBatchIsSkipped) {
  for (const int64_t bad_from : {64, 65}) {
    Regression regression(1);
    regression.before_step = [&](int64_t step) { regression.factor = step >= bad_from ? std::nan("") : 1; };
    TrainerOptions options = options_of(65);
    options.log_every = 1;
    const std::string error = train(regression, options).error;
    if (bad_from == 65) {
      EXPECT_EQ(error, "");
    } else {
      EXPECT_NE(error.find("the last step (65) is not finite"), std::string::npos) << error;
    }
  }
}

TEST(Trainer, SkippedStepsAreSeenThoughFewAreLogged) {
  Regression regression(1);
  regression.before_step = [&](int64_t step) { regression.factor = step > 6 ? std::nan("") : 1; };
  TrainerOptions options = options_of(100);
  options.log_every = 10;
  const Ran ran = train(regression, options);
  // At step 10 four are known to be skipped, but not that they were the last; at step 20 ten more are.
  EXPECT_NE(ran.error.find("up to step 20"), std::string::npos) << ran.error;
}

TEST(Trainer, AnOverflowInF16LowersTheScaleAndIsShown) {
  for (const int accumulate : {1, 4}) {
    Regression regression(accumulate, DType::f16, optim::LossScale{.interval = 4});
    // A scale above 2^7, with several micro-batches 2^9, overflows at once, and again after each rise.
    regression.factor = 512;
    const Ran ran = train(regression, options_of(20));
    ASSERT_EQ(ran.error, "");
    ASSERT_EQ(ran.metrics.size(), 20u);
    double skipped = 0, scale = 0x1p16;
    for (const StepRecord& record : ran.metrics) {
      const bool finite = std::isfinite(record.values.at("grad_norm"));
      EXPECT_EQ(record.values.at("skipped_steps"), skipped += !finite) << record.step;
      EXPECT_TRUE(std::isfinite(record.values.at("loss")));
      const double now = record.values.at("loss_scale");
      EXPECT_TRUE(finite ? now == scale || now == 2 * scale : now == scale / 2) << record.step;
      scale = now;
    }
    EXPECT_GE(skipped, 2);
    EXPECT_LE(skipped, 15);
    EXPECT_EQ(ran.result.skipped, int64_t(skipped));
    EXPECT_EQ(ran.result.loss_scale, scale);
    EXPECT_LT(ran.metrics.back().values.at("loss"), ran.metrics.front().values.at("loss"));
  }
}

TEST(Trainer, OptionsOfTheLossScaleThatAreNotGivenAreTheOptimizers) {
  for (const auto& [initial, interval] : {std::pair{1024, 0}, {0, 7}, {512, 3}, {0, 0}}) {
    Regression regression(1, DType::f16, optim::LossScale{.initial = 256, .growth = 4, .interval = 50});
    TrainerOptions options = options_of(1);
    options.loss_scale = initial, options.loss_scale_interval = interval;
    const Ran ran = train(regression, options);
    ASSERT_EQ(ran.error, "");
    const optim::LossScale& used = regression.optimizer.loss_scale_options();
    EXPECT_EQ(used.initial, initial ? initial : 256);
    EXPECT_EQ(used.interval, interval ? interval : 50);
    EXPECT_EQ(used.growth, 4);
    EXPECT_EQ(ran.result.loss_scale, used.initial);
  }
}

TEST(Trainer, AScaleThatFellToItsMinimumInVainStopsTheRun) {
  Regression regression(1, DType::f16, optim::LossScale{.initial = 256, .minimum = 4});
  std::vector<double> before;
  regression.before_step = [&](int64_t step) {
    if (step != 4) return;
    before = regression.weights();
    regression.factor = std::numeric_limits<double>::infinity();
  };
  const Ran ran = train(regression, options_of(50));
  // Six steps at 256, 128, 64, 32, 16 and 8; then the minimum, five times in a row.
  EXPECT_EQ(regression.begun, 3 + 6 + 5);
  EXPECT_EQ(regression.weights(), before);
  for (const char* part :
       {"not finite for 5 steps", "up to step 14", "loss scale has fallen to its minimum, 4",
        "bf16 instead of f16", "--check-finite"})
    EXPECT_NE(ran.error.find(part), std::string::npos) << part << " in: " << ran.error;
  EXPECT_EQ(ran.metrics.back().values.at("skipped_steps"), 11);
}

TEST(Trainer, CheckFiniteNamesOperatorAndStep) {
  Regression regression(1);
  regression.before_step = [&](int64_t step) { regression.factor = step == 3 ? std::nan("") : 1; };
  TrainerOptions options = options_of(10);
  options.check_finite = true;
  const Ran ran = train(regression, options);
  EXPECT_NE(ran.error.find("scale"), std::string::npos) << ran.error;
  EXPECT_EQ(regression.begun, 3);
}

class Signals : public ::testing::TestWithParam<int> {};

TEST_P(Signals, EndTheRunAfterTheStepUnderWay) {
  Regression regression(1);
  regression.before_step = [&](int64_t step) {
    if (step == 4) std::raise(GetParam());
  };
  TrainerOptions options = options_of(50);
  options.log_every = 100;
  const Ran ran = train(regression, options);
  EXPECT_EQ(ran.error, "");
  EXPECT_EQ(ran.result.outcome, Outcome::interrupted);
  EXPECT_EQ(ran.result.signal, GetParam());
  EXPECT_EQ(ran.result.step, 4);
  EXPECT_EQ(regression.saved, std::vector<int64_t>{4});
  ASSERT_FALSE(ran.metrics.empty());
  EXPECT_EQ(ran.metrics.back().step, 4);
}
INSTANTIATE_TEST_SUITE_P(Both, Signals, ::testing::Values(SIGINT, SIGTERM));

TEST(Trainer, ASignalDuringTheLastStepIsNoInterruption) {
  Regression regression(1);
  regression.before_step = [&](int64_t step) {
    if (step == 5) std::raise(SIGINT);
  };
  EXPECT_EQ(train(regression, options_of(5)).result.outcome, Outcome::finished);
}

TEST(Trainer, SavesBeforeItEvaluatesAndSamples) {
  Regression regression(1);
  std::vector<std::string> done;
  regression.on_save = [&](int64_t step) { done.push_back("save " + std::to_string(step)); };
  regression.on_evaluate = [&] {
    done.push_back("evaluate");
    return std::map<std::string, double>{{"eval_nll", 1}};
  };
  regression.on_sample = [&](int64_t step) { done.push_back("sample " + std::to_string(step)); };
  TrainerOptions options = options_of(6);
  options.eval_every = 2, options.save_every = 4;
  ASSERT_EQ(train(regression, options).error, "");
  EXPECT_EQ(done,
            (std::vector<std::string>{"evaluate", "save 4", "evaluate", "save 6", "evaluate", "sample 6"}));
}

/// What a curve is made of, evaluations included.
std::vector<std::map<std::string, double>> curve(const std::vector<StepRecord>& metrics) {
  std::vector<std::map<std::string, double>> lines;
  for (const StepRecord& record : metrics) {
    lines.push_back({{"step", double(record.step)}});
    for (const auto& [name, value] : record.values)
      if (name == "loss" || name == "grad_norm" || name.starts_with("eval_") || name == "unevaluated")
        lines.back()[name] = value;
  }
  return lines;
}

/// How many evaluations TensorBoard shows; -1 if it shows the marker of a missing one.
int64_t shown_evaluations(const RunFolder& run) {
  int64_t shown = 0;
  for (const auto& entry : std::filesystem::directory_iterator(run.path())) {
    if (entry.path().filename().string().find("tfevents") == std::string::npos) continue;
    const std::string bytes = get(entry.path());
    if (bytes.find("unevaluated") != std::string::npos) return -1;
    for (size_t at = bytes.find("eval_nll"); at != std::string::npos; at = bytes.find("eval_nll", at + 1))
      ++shown;
  }
  return shown;
}

/// A run of six steps, evaluated after each second one, that is stopped and goes on in the same folder.
struct StoppedRun {
  explicit StoppedRun(int64_t save_every) {
    regression.on_evaluate = [this] {
      evaluations += 1;
      if (on_evaluation) on_evaluation();
      check_interrupt();
      double sum = 0;
      for (const double weight : regression.weights()) sum += weight;
      return std::map<std::string, double>{{"eval_nll", sum}};
    };
    regression.on_sample = [this](int64_t step) {
      run.append(Sample{step, "text"});
      samples.push_back(step);
    };
    options.eval_every = 2, options.save_every = save_every, options.sample_every = 2;
  }
  TrainResult go_on(int64_t from) {
    run.truncate_metrics(from);
    return train(regression, run, options, from, progress);
  }
  const TemporaryFolder root;
  RunFolder run = RunFolder::create(root.path(), "r");
  Regression regression{1};
  TrainerOptions options = options_of(6);
  report::Progress progress{report::Progress::Mode::quiet};
  std::function<void()> on_evaluation;
  int evaluations = 0;
  std::vector<int64_t> samples;
};

TEST(Trainer, AnInterruptedEvaluationIsGivenUpAndDoneByTheRunThatGoesOn) {
  for (const int64_t save_every : {0, 2}) {
    StoppedRun whole(save_every);
    ASSERT_EQ(whole.go_on(0).outcome, Outcome::finished);
    for (const int stopped_in : {1, 2, 3}) {
      StoppedRun cut(save_every);
      cut.on_evaluation = [&] {
        if (cut.evaluations == stopped_in) std::raise(SIGTERM);
      };
      const TrainResult first = cut.go_on(0);
      EXPECT_EQ(first.outcome, Outcome::interrupted);
      EXPECT_EQ(first.signal, SIGTERM);
      EXPECT_EQ(first.step, 2 * stopped_in);
      ASSERT_FALSE(cut.regression.saved.empty());
      EXPECT_EQ(cut.regression.saved.back(), first.step);
      EXPECT_EQ(cut.run.metrics().back().values.count("unevaluated"), 1u);
      const TrainResult second = cut.go_on(first.step);
      EXPECT_EQ(second.outcome, Outcome::finished);
      EXPECT_EQ(second.step, 6);
      EXPECT_EQ(curve(cut.run.metrics()), curve(whole.run.metrics()));
      EXPECT_EQ(second.evaluation, whole.run.metrics().back().values.count("eval_nll")
                                       ? (std::map<std::string, double>{
                                             {"eval_nll", whole.run.metrics().back().values.at("eval_nll")}})
                                       : (std::map<std::string, double>{}));
      EXPECT_EQ(cut.samples, whole.samples);
      EXPECT_EQ(shown_evaluations(cut.run), shown_evaluations(whole.run));
      if (io::EventWriter::available()) EXPECT_EQ(shown_evaluations(cut.run), 3);
    }
  }
}

TEST(Trainer, ASignalDuringTheLastStepSavesAndLeavesTheEvaluationToTheRunThatGoesOn) {
  StoppedRun whole(0), cut(0);
  ASSERT_EQ(whole.go_on(0).outcome, Outcome::finished);
  cut.regression.before_step = [&](int64_t step) {
    if (step == 6) std::raise(SIGINT);
  };
  EXPECT_EQ(cut.go_on(0).outcome, Outcome::interrupted);
  EXPECT_EQ(cut.evaluations, 2);
  EXPECT_EQ(cut.regression.saved, std::vector<int64_t>{6});
  cut.regression.before_step = {};
  EXPECT_EQ(cut.go_on(6).outcome, Outcome::finished);
  EXPECT_EQ(curve(cut.run.metrics()), curve(whole.run.metrics()));
  EXPECT_EQ(cut.samples, whole.samples);
}

TEST(Trainer, ARunKilledBeforeItRemovedOldCheckpointsRemovesThemWhenItGoesOn) {
  StoppedRun whole(1);
  ASSERT_EQ(whole.go_on(0).outcome, Outcome::finished);
  const io::CheckpointFolder folder(whole.run.checkpoints().string());
  ASSERT_EQ(folder.steps(), (std::vector<int64_t>{6, 5, 4}));
  fs::copy(folder.file_of(4), folder.file_of(3));
  EXPECT_EQ(whole.go_on(6).outcome, Outcome::finished);
  EXPECT_EQ(folder.steps(), (std::vector<int64_t>{6, 5, 4}));
}

// ---- what is due when ----

TEST(Due, IsTheFirstTheLastAndEveryNthStep) {
  const TrainerOptions options{
      .steps = 20, .log_every = 7, .eval_every = 6, .sample_every = 9, .save_every = 5};
  const JobInfo info{.evaluates = true, .samples = true};
  std::vector<int64_t> logged, evaluated, sampled, saved;
  for (int64_t done = 1; done <= 20; ++done) {
    const Due due = due_after(done, options, info);
    EXPECT_EQ(due.last, done == 20);
    if (due.log) logged.push_back(done);
    if (due.evaluate) evaluated.push_back(done);
    if (due.sample) sampled.push_back(done);
    if (due.save) saved.push_back(done);
  }
  EXPECT_EQ(logged, (std::vector<int64_t>{1, 6, 7, 9, 12, 14, 18, 20}));
  EXPECT_EQ(evaluated, (std::vector<int64_t>{6, 12, 18, 20}));
  EXPECT_EQ(sampled, (std::vector<int64_t>{9, 18}));
  EXPECT_EQ(saved, (std::vector<int64_t>{5, 10, 15, 20}));
  EXPECT_FALSE(due_after(20, options, {}).evaluate);
}

}  // namespace
}  // namespace tessera::train
