#include <cmath>
#include <functional>
#include <string>
#include <type_traits>
#include <vector>

#include "autograd/tape.h"
#include "io/checkpoint_folder.h"
#include "ops/dropout/dropout.h"
#include "ops/pointwise/pointwise.h"
#include "ops/reduce/reduce.h"
#include "optim/sgd.h"
#include "report/progress.h"
#include "tests/errors.h"
#include "tests/folder.h"
#include "tests/train/regression.h"
#include "train/step.h"

namespace tessera::train {
namespace {

using test::kIn;
using test::kOut;
using test::kRows;
using test::options_of;
using test::Regression;

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
  report::Progress progress(report::Progress::Mode::quiet);
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
          "own", std::move(parameters), {.lr = 5e-2, .max_grad_norm = 1},
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
  report::Progress progress(report::Progress::Mode::quiet);
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
  report::Progress progress(report::Progress::Mode::quiet);
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
  report::Progress progress(report::Progress::Mode::quiet);
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
  report::Progress progress(report::Progress::Mode::quiet);
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
