#include "train/trainer.h"

#include <array>
#include <cmath>
#include <condition_variable>
#include <csignal>
#include <cstring>
#include <mutex>
#include <optional>

#include "autograd/tape.h"
#include "comm/deadline.h"
#include "comm/threads.h"
#include "dist/world.h"
#include "io/checkpoint_folder.h"
#include "nn/linear.h"
#include "ops/dropout/dropout.h"
#include "ops/pointwise/pointwise.h"
#include "ops/reduce/reduce.h"
#include "optim/adamw.h"
#include "optim/sgd.h"
#include "runtime/interrupt.h"
#include "runtime/philox.h"
#include "tests/errors.h"
#include "tests/folder.h"
#include "train/due.h"
#include "train/step.h"

namespace tessera::train {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kRows = 12, kIn = 5, kOut = 3;

/// Linear regression on fixed numbers, its batch cut into `parts`. What a test hooks in is done as well.
struct Regression : Job {
  explicit Regression(int parts, DType dtype = DType::f64, const std::optional<optim::LossScale>& scale = {})
      : Job(Device::cpu()),
        rng(1),
        layer(kIn, kOut, rng, Device::cpu(), {.dtype = dtype}),
        optimizer(nn::parameters(layer), {.lr = 1e-2, .max_norm = 1, .loss_scale = scale}),
        parts(parts) {
    x = numbers(0, {kRows, kIn}).to(dtype), y = numbers(1, {kRows, kOut}).to(dtype);
    keep("model", layer), train_with(optimizer);
  }
  JobInfo info() const override {
    return {.evaluates = bool(on_evaluate),
            .samples = bool(on_sample),
            .micro_batches = parts,
            .tokens_per_step = kRows};
  }
  void batch(uint64_t index) override {
    part = int(index % uint64_t(parts));
    if (before_step && part == 0) before_step(++begun);
  }
  Tensor loss() override {
    const int64_t rows = kRows / parts;
    const Tensor error = ops::sub(layer(x.slice(0, part * rows, (part + 1) * rows)),
                                  y.slice(0, part * rows, (part + 1) * rows));
    return ops::scale(ops::mean(ops::mul(error, error)), factor);
  }
  Values evaluate() override { return on_evaluate(); }
  Verdict judge(int64_t, const Values& values) override { return on_judge ? on_judge(values) : Verdict{}; }
  void sample(int64_t step, const RunFolder&) override { on_sample(step); }
  io::Checkpoint checkpoint(int64_t step) const override {
    on_save(step);
    return Job::checkpoint(step);
  }

  static Tensor numbers(uint64_t stream, const Shape& shape) {
    std::vector<double> values(size_t(shape.count()));
    for (size_t i = 0; i < values.size(); ++i)
      values[i] = 2 * double(uniform_half_open(philox(3, stream, i).word[0])) - 1;
    return Tensor::from(values, shape);
  }

  std::vector<double> weights() const {
    auto all = layer.weight.detach().to_vector<double>();
    for (const double value : layer.bias.detach().to_vector<double>()) all.push_back(value);
    return all;
  }

  Rng rng;
  nn::Linear layer;
  optim::AdamW optimizer;
  int parts, part = -1;
  int64_t begun = 0;
  double factor = 1;
  Tensor x, y;
  std::function<void(int64_t step)> before_step;
  std::function<Values()> on_evaluate;
  std::function<Verdict(const Values&)> on_judge;
  std::function<void(int64_t step)> on_sample;
  std::vector<int64_t> saved;
  std::function<void(int64_t step)> on_save = [this](int64_t step) { saved.push_back(step); };
};

TrainerOptions options_of(int64_t steps) {
  return {.steps = steps,
          .log_every = 1,
          .schedule = optim::Schedule({.kind = optim::ScheduleKind::constant, .lr = 1e-2})};
}

struct Ran {
  TrainResult result;
  std::vector<StepRecord> metrics;
  std::string error;
};

Ran train(Regression& regression, const TrainerOptions& options, int64_t first_step = 0) {
  const TemporaryFolder root;
  const RunFolder run = RunFolder::create(root.path(), "r");
  Progress progress(Progress::Mode::quiet);
  Ran ran;
  ran.error = message_of([&] { ran.result = train(regression, run, options, first_step, progress); });
  ran.metrics = run.metrics();
  return ran;
}

TEST(Trainer, ARunThatMayNotSaveEndsBeforeItsFirstStep) {
  const TemporaryFolder root;
  fs::permissions(root.path(), fs::perms::all);
  const UnprivilegedUser user;
  const RunFolder run = RunFolder::create(root.path(), "r");
  fs::permissions(run.checkpoints(), fs::perms::owner_read | fs::perms::owner_exec);
  Regression regression(1);
  Progress progress(Progress::Mode::quiet);
  const std::string said = message_of([&] { train(regression, run, options_of(6), progress); });
  EXPECT_NE(said.find("checkpoints is read-only for this user"), std::string::npos) << said;
  EXPECT_EQ(regression.begun, 0);
  fs::permissions(run.checkpoints(), fs::perms::owner_all);
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
  for (const char* part :
       {"not finite for 5 steps", "up to step 8", "checkpoints", "--check-finite", "learning rate"})
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
  Progress progress{Progress::Mode::quiet};
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

// ---- several ranks ----

/// Makes the calls of another communicator; before each it says for how many seconds that may wait.
class Timed : public comm::Transport {
 public:
  Timed(comm::Communicator inner, std::function<void(double limit)> before)
      : inner_(std::move(inner)), before_(std::move(before)) {}
  const char* name() const override { return "timed"; }
  int rank() const override { return inner_.rank(); }
  int size() const override { return inner_.size(); }
  bool takes(Device device) const override { return device.is_cpu(); }
  void run(const comm::Call& call, const Tensor& in, const Tensor& out) override {
    before_(comm::call_timeout());
    switch (call.kind) {
      case comm::Kind::all_reduce:
        return inner_.all_reduce(out);
      case comm::Kind::all_gather:
        return inner_.all_gather(in, out);
      case comm::Kind::broadcast:
        return inner_.broadcast(out, call.peer);
      case comm::Kind::barrier:
        return inner_.barrier();
      default:
        FAIL() << call.text();
    }
  }
  void reduce_parts(const comm::Call&, const Tensor&, std::span<const int64_t>) override {}
  void share(const comm::Call&, std::span<const Tensor>, std::span<const int>) override {}
  std::shared_ptr<comm::Transport> part(const std::vector<int>&, uint64_t) override { return nullptr; }
  void fail(const std::string& cause) override { inner_.fail(cause); }

 private:
  comm::Communicator inner_;
  std::function<void(double)> before_;
};

/// The limits of the calls that each of two ranks has made, in their order, which is the same on both.
class CallLimits {
 public:
  void add(int rank, double limit) {
    const std::lock_guard lock(mutex_);
    of_rank_[size_t(rank)].push_back(limit);
    changed_.notify_all();
  }
  /// Called on rank 0 between two calls: the limit of rank 1's next one, once it waits in that.
  double of_waiting_rank() {
    std::unique_lock lock(mutex_);
    const size_t next = of_rank_[0].size();
    changed_.wait(lock, [&] { return of_rank_[1].size() > next; });
    return of_rank_[1][next];
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::array<std::vector<double>, 2> of_rank_;
};

/// Trains on two ranks, from `first_step` on; prepare(job, rank) adds what a rank does besides.
std::array<Ran, 2> train_on_two(const std::function<void(Regression&, int rank)>& prepare,
                                TrainerOptions options, int64_t first_step = 0,
                                CallLimits* limits = nullptr) {
  const InterruptGuard outermost;
  options.bucket_mb = 0;
  std::array<Ran, 2> ran;
  comm::run_threads(2, [&](comm::Communicator& c) {
    const comm::Communicator timed(std::make_shared<Timed>(c, [&, rank = c.rank()](double limit) {
      if (limits) limits->add(rank, limit);
    }));
    const dist::World world(timed, timed);
    TrainerOptions own = options;
    own.world = &world;
    Regression regression(2);
    prepare(regression, c.rank());
    Ran& end = ran[size_t(c.rank())];
    end = train(regression, own, first_step);
    check(end.error.empty(), end.error);
  });
  return ran;
}

// Rank 0 may write a large checkpoint for longer than a call may take.
TEST(TrainerOnRanks, WaitForRankZeroWhileItSavesAndSamples) {
  TrainerOptions options = options_of(3);
  options.save_every = 1, options.sample_every = 1;
  for (const int64_t first_step : {0, 2}) {
    CallLimits limits;
    int alone = 0;
    train_on_two(
        [&](Regression& regression, int rank) {
          const auto work = [&, rank](int64_t step) {
            if (rank > 0) return;
            alone += 1;
            EXPECT_EQ(limits.of_waiting_rank(), 0) << step;
          };
          regression.on_save = regression.on_sample = work;
        },
        options, first_step, &limits);
    EXPECT_EQ(alone, first_step == 0 ? 6 : 3);
  }
}

/// Two ranks whose evaluations are not the same number.
TEST(TrainerOnRanks, AllDecideByTheEvaluationOfRankZero) {
  for (const bool rank_zero_stops : {true, false}) {
    TrainerOptions options = options_of(6);
    options.eval_every = 2;
    const std::array<Ran, 2> ran = train_on_two(
        [&](Regression& regression, int rank) {
          regression.on_evaluate = [rank] { return Values{{"eval_a", 3 + rank}, {"eval_nll", rank}}; };
          regression.on_judge = [&](const Values& values) {
            return Verdict{.save = true, .stop = (values.at("eval_nll") == 0) == rank_zero_stops};
          };
        },
        options);
    for (const Ran& one : ran) {
      EXPECT_EQ(one.result.step, rank_zero_stops ? 2 : 6);
      EXPECT_EQ(one.result.evaluation, (Values{{"eval_a", 3}, {"eval_nll", 0}}));
    }
  }
}

TEST(TrainerOnRanks, AnEvaluationInterruptedOnOneRankIsGivenUpOnAll) {
  for (const int interrupted : {0, 1}) {
    TrainerOptions options = options_of(6);
    options.eval_every = 2;
    const std::array<Ran, 2> ran = train_on_two(
        [&](Regression& regression, int rank) {
          regression.on_evaluate = [&, rank]() -> Values {
            if (rank == interrupted) throw Interrupted(SIGTERM, __FILE__, __LINE__);
            return {{"eval_nll", 1}};
          };
        },
        options);
    for (const Ran& one : ran) {
      EXPECT_EQ(one.result.outcome, Outcome::interrupted);
      EXPECT_EQ(one.result.step, 2);
      EXPECT_TRUE(one.result.evaluation.empty());
    }
    EXPECT_EQ(ran[0].metrics.back().values.count("unevaluated"), 1u);
  }
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

// ---- jobs of one's own, with any optimizer ----

/// Follows the sign of the gradient: none of ours, with a state of its own and no counts.
struct SignDescent {
  std::vector<nn::NamedParameter> parameters;
  double lr = 1e-2;
  int64_t steps = 0;
  void step() {
    for (const auto& [name, tensor] : parameters) {
      const std::vector<double> slope = grad(tensor).to_vector<double>();
      std::vector<double> weight = tensor.detach().to_vector<double>();
      for (size_t i = 0; i < slope.size(); ++i) weight[i] -= lr * double((slope[i] > 0) - (slope[i] < 0));
      tensor.detach().copy_from(Tensor::from(weight, tensor.shape()));
    }
    steps += 1;
  }
  void zero_grad() {
    for (const auto& parameter : parameters) tessera::zero_grad(parameter.tensor);
  }
  void set_lr(double value) { lr = value; }
  void fields(auto&& visit) { visit("lr", lr), visit("steps", steps); }
};

/// A rule that no elementwise formula makes, written with operators: the average gradient over its norm.
class NormalizedMomentum : public optim::Rule {
 public:
  const char* name() const override { return "normalized"; }
  void begin() override { average_ = arena("average"), direction_ = scratch_arena(); }
  void step() override {
    take_gradients(direction_);
    commit(average_, ops::add(ops::scale(average_, 0.9), ops::scale(direction_, 0.1)));
    for (size_t i = 0; i < parameters().size(); ++i) {
      const Tensor average = view(average_, i).clone();
      const Tensor flat = ops::mul(average, average).packed().reshape({average.count()});
      view(direction_, i).copy_from(ops::div(average, ops::sqrt(ops::sum(flat, 0, true))));
    }
    descend(direction_);
  }

 private:
  Tensor average_, direction_;
};

template <class Optimizer, class Make>
struct OwnJob : Job {
  OwnJob(int parts, Make make)
      : Job(Device::cpu()),
        data(parts),
        layer(kIn, kOut, rng, Device::cpu(), {.dtype = DType::f64}),
        optimizer(make(nn::parameters(layer))) {
    keep("model", layer), train_with(optimizer);
  }
  JobInfo info() const override { return {.micro_batches = data.parts}; }
  void batch(uint64_t index) override { data.batch(index); }
  Tensor loss() override {
    const int64_t rows = kRows / data.parts;
    const Tensor error = ops::sub(layer(data.x.slice(0, data.part * rows, (data.part + 1) * rows)),
                                  data.y.slice(0, data.part * rows, (data.part + 1) * rows));
    return ops::scale(ops::mean(ops::mul(error, error)), data.factor);
  }
  Regression data;
  Rng rng{7};
  nn::Linear layer;
  Optimizer optimizer;
};
template <class Make>
OwnJob(int, Make) -> OwnJob<std::invoke_result_t<Make, std::vector<nn::NamedParameter>>, Make>;

/// Trains 20 steps, in one go and stopped after 8, and expects the same bytes in the last checkpoint.
template <class Make>
void expect_learns_and_resumes(int parts, Make make) {
  const TemporaryFolder root;
  Progress progress(Progress::Mode::quiet);
  const RunFolder whole = RunFolder::create(root.path(), "whole"),
                  cut = RunFolder::create(root.path(), "cut");
  TrainerOptions options = options_of(20);
  OwnJob job(parts, make), first(parts, make), second(parts, make);
  const TrainResult result = train(job, whole, options, progress);
  EXPECT_EQ(result.step, 20);
  const std::vector<StepRecord> curve = whole.metrics();
  EXPECT_LT(curve.back().values.at("loss"), 0.9 * curve.front().values.at("loss"));
  options.steps = 8;
  train(first, cut, options, progress);
  options.steps = 20;
  EXPECT_EQ(train(second, cut, options, progress).step, 20);
  EXPECT_EQ(get(whole.checkpoints() / "step-000020.safetensors"),
            get(cut.checkpoints() / "step-000020.safetensors"));
  EXPECT_EQ(cut.metrics().size(), 20u);
}

TEST(OwnJob, AnyOptimizerTrainsAndResumes) {
  for (const int parts : {1, 3}) {
    expect_learns_and_resumes(parts, [](auto parameters) {
      return optim::Sgd(std::move(parameters), {.lr = 1e-2, .momentum = 0.9});
    });
    expect_learns_and_resumes(parts, [](auto parameters) {
      return optim::Optimizer(
          "own", std::move(parameters), {.lr = 5e-2, .max_norm = 1},
          {{std::make_shared<NormalizedMomentum>(), optim::decays}, {optim::adamw_rule()}});
    });
    expect_learns_and_resumes(
        parts, [](auto parameters) { return SignDescent{.parameters = std::move(parameters)}; });
  }
}

/// The trainer counts and skips with rules of one's own as with ours: weights and states keep their bits.
TEST(OwnJob, RulesOfOnesOwnSkipStepsWithoutAFiniteNorm) {
  const TemporaryFolder root;
  const RunFolder run = RunFolder::create(root.path(), "r");
  Progress progress(Progress::Mode::quiet);
  OwnJob job(1, [](auto parameters) {
    return optim::Optimizer("own", std::move(parameters), {.lr = 1e-2},
                            {{std::make_shared<NormalizedMomentum>()}});
  });
  std::vector<std::vector<double>> before;
  const auto state = [&] {
    std::vector<std::vector<double>> all{job.layer.weight.detach().template to_vector<double>()};
    for_each_field(job.optimizer, [&](const std::string& name, auto& leaf) {
      if constexpr (std::is_same_v<std::remove_cvref_t<decltype(leaf)>, Tensor>)
        if (name != "counts") all.push_back(leaf.template to_vector<double>());
    });
    return all;
  };
  job.data.before_step = [&](int64_t step) {
    job.data.factor = step == 5 ? std::nan("") : 1;
    if (step == 5) before = state();
    if (step == 6) EXPECT_EQ(state(), before);
    if (step == 7) EXPECT_NE(state(), before);
  };
  EXPECT_EQ(train(job, run, options_of(10), progress).skipped, 1);
  EXPECT_FALSE(before.empty());
}

TEST(OwnJob, AnOptimizerThatSkipsNothingEndsAtTheFirstLossThatIsNotFinite) {
  const TemporaryFolder root;
  const RunFolder run = RunFolder::create(root.path(), "r");
  Progress progress(Progress::Mode::quiet);
  OwnJob job(1, [](auto parameters) { return SignDescent{.parameters = std::move(parameters)}; });
  job.data.before_step = [&](int64_t step) { job.data.factor = step == 5 ? std::nan("") : 1; };
  const std::string error = message_of([&] { train(job, run, options_of(20), progress); });
  for (const char* part : {"the loss of step 5 is not finite", "does not skip", "learning rate"})
    EXPECT_NE(error.find(part), std::string::npos) << part << " in: " << error;
  EXPECT_FALSE(run.metrics().front().values.contains("grad_norm"));
}

TEST(OwnJob, NoCheckpointIsSavedOfALossThatIsNotFiniteBetweenLoggedSteps) {
  const TemporaryFolder root;
  const RunFolder run = RunFolder::create(root.path(), "r");
  Progress progress(Progress::Mode::quiet);
  OwnJob job(1, [](auto parameters) { return SignDescent{.parameters = std::move(parameters)}; });
  job.data.before_step = [&](int64_t step) { job.data.factor = step >= 5 ? std::nan("") : 1; };
  TrainerOptions options = options_of(20);
  options.log_every = 10, options.save_every = 3;
  const std::string error = message_of([&] { train(job, run, options, progress); });
  EXPECT_NE(error.find("the loss of step 6 is not finite"), std::string::npos) << error;
  EXPECT_TRUE(std::filesystem::exists(run.checkpoints() / "step-000003.safetensors"));
  EXPECT_FALSE(std::filesystem::exists(run.checkpoints() / "step-000006.safetensors"));
}

/// A model whose inputs dropout thins out: the job says from which generator and nothing else about it.
struct DroppingJob : Job {
  DroppingJob() : Job(Device::cpu()) { keep("model", layer), train_with(optimizer), draws_from("rng", rng); }
  void batch(uint64_t) override {}
  Tensor loss() override {
    return ops::mean(layer(ops::dropout(Tensor::full({4, 16}, 1, DType::f32, Device::cpu()), 0.5, rng)));
  }
  Rng rng{11};
  nn::Linear layer{16, 1, rng, Device::cpu()};
  optim::AdamW optimizer{nn::parameters(layer)};
};

TEST(OwnJob, AResumedRunGoesOnWithTheRandomNumbersOfItsLoss) {
  const TemporaryFolder root;
  Progress progress(Progress::Mode::quiet);
  const RunFolder whole = RunFolder::create(root.path(), "whole"),
                  cut = RunFolder::create(root.path(), "cut");
  DroppingJob job, first, second;
  train(job, whole, options_of(6), progress);
  train(first, cut, options_of(3), progress);
  train(second, cut, options_of(6), progress);
  EXPECT_EQ(second.rng.state(), job.rng.state());
  EXPECT_EQ(second.layer.weight.detach().to_vector<float>(), job.layer.weight.detach().to_vector<float>());
}

TEST(OwnJob, WithoutAnOptimizerSaysWhatToCall) {
  struct Empty : Job {
    Empty() : Job(Device::cpu()) {}
    void batch(uint64_t) override {}
    Tensor loss() override { return Tensor::zeros({}, DType::f32, Device::cpu()); }
  } job;
  EXPECT_NE(message_of([&] { Step step(job); }).find("train_with"), std::string::npos);
}

TEST(OwnJob, RestoresAllOrNothing) {
  const TemporaryFolder root;
  OwnJob a(1, [](auto parameters) { return SignDescent{.parameters = std::move(parameters)}; });
  OwnJob b(1, [](auto parameters) { return optim::Sgd(std::move(parameters), {}); });
  const std::string file = root / "c.safetensors";
  a.layer.weight.detach().fill(3);
  a.checkpoint(4).save(file);
  const std::vector<double> before = b.layer.weight.detach().template to_vector<double>();
  EXPECT_NE(message_of([&] { b.restore(file); }).find("optimizer.steps"), std::string::npos);
  EXPECT_EQ(b.layer.weight.detach().template to_vector<double>(), before);
  a.layer.weight.detach().fill(0);
  EXPECT_EQ(a.restore(file), 4);
  EXPECT_EQ(a.layer.weight.detach().template to_vector<double>()[0], 3);
}

}  // namespace
}  // namespace tessera::train
