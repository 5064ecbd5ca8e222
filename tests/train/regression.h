#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "nn/linear.h"
#include "ops/pointwise/pointwise.h"
#include "ops/reduce/reduce.h"
#include "optim/adamw.h"
#include "runtime/philox.h"
#include "tests/errors.h"
#include "tests/folder.h"
#include "train/trainer.h"

/// A small job for tests of the trainer.

namespace tessera::train::test {

inline constexpr int64_t kRows = 12, kIn = 5, kOut = 3;

/// Linear regression on fixed numbers, its batch cut into `parts`. What a test hooks in is done as well.
struct Regression : Job {
  explicit Regression(int parts, DType dtype = DType::f64, const std::optional<optim::LossScale>& scale = {})
      : Job(Device::cpu()),
        rng(1),
        layer(kIn, kOut, rng, Device::cpu(), {.dtype = dtype}),
        optimizer(nn::parameters(layer), {.lr = 1e-2, .max_grad_norm = 1, .loss_scale = scale}),
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

inline TrainerOptions options_of(int64_t steps) {
  return {.steps = steps,
          .log_every = 1,
          .schedule = optim::Schedule({.kind = optim::ScheduleKind::constant, .lr = 1e-2})};
}

struct Ran {
  TrainResult result;
  std::vector<StepRecord> metrics;
  std::string error;
};

inline Ran train(Regression& regression, const TrainerOptions& options, int64_t first_step = 0) {
  const TemporaryFolder root;
  const RunFolder run = RunFolder::create(root.path(), "r");
  report::Progress progress(report::Progress::Mode::quiet);
  Ran ran;
  ran.error = message_of([&] { ran.result = train::train(regression, run, options, first_step, progress); });
  ran.metrics = run.metrics();
  return ran;
}

}  // namespace tessera::train::test
