/// Jobs of one's own that are used in other ways than the bundled ones: what train::Job and train::Step
/// accept, and what they refuse, at which moment.

#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "nn/dropout.h"
#include "nn/linear.h"
#include "ops/pointwise/pointwise.h"
#include "ops/reduce/reduce.h"
#include "ops/shape/shape.h"
#include "optim/sgd.h"
#include "tests/errors.h"
#include "tests/folder.h"
#include "train/step.h"
#include "train/trainer.h"

namespace tessera::train {
namespace {

/// The mean square of a linear layer's results, in the shape that a test asks for.
struct Square : Job {
  explicit Square(int parts = 1) : Job(Device::cpu()), parts(parts) {
    keep("model", layer), train_with(optimizer);
  }
  JobInfo info() const override { return {.micro_batches = parts, .penalties = names}; }
  void batch(uint64_t) override {}
  Tensor loss() override {
    const Tensor y = layer(Tensor::full({2, 3}, 1, DType::f32, device()));
    return as(ops::mean(ops::mul(y, y)));
  }
  std::vector<Tensor> penalties() override {
    std::vector<Tensor> all;
    for (int i = 0; i < given; ++i) all.push_back(as(ops::sum(ops::mul(layer.weight, layer.weight))));
    return all;
  }

  int parts, given = 0;
  std::vector<std::string> names = {};
  std::function<Tensor(const Tensor&)> as = [](const Tensor& value) { return value; };
  Rng rng{1};
  nn::Linear layer{3, 1, rng};
  optim::Sgd optimizer{nn::parameters(layer), {.lr = 0.1}};
};

/// The weights after three steps; the message of the error if there is one.
std::string train_three(Square& job) {
  return message_of([&] {
    Step step(job);
    for (int i = 0; i < 3; ++i) step();
  });
}

TEST(OwnJob, PenaltiesAreThoseThatInfoNames) {
  for (const int parts : {1, 2}) {
    Square more(parts), fewer(parts), right(parts);
    more.given = 2, more.names = {"a"};
    EXPECT_EQ(
        train_three(more),
        "job: penalties() gave 2 tensors, and info() names 1; give one for each name, undefined where it "
        "is 0");
    fewer.given = 1, fewer.names = {"a", "b"};
    EXPECT_EQ(
        train_three(fewer),
        "job: penalties() gave 1 tensors, and info() names 2; give one for each name, undefined where it "
        "is 0");
    right.given = 1, right.names = {"a"};
    EXPECT_EQ(train_three(right), "");
  }
}

TEST(OwnJob, LossesAndPenaltiesHaveOneElementOfAnyShape) {
  for (const int parts : {1, 2}) {
    Square scalar(parts), matrix(parts), row(parts), none(parts);
    for (Square* const job : {&scalar, &matrix, &row}) job->given = 1, job->names = {"a"};
    matrix.as = [](const Tensor& value) { return ops::reshape(value, {1, 1}); };
    ASSERT_EQ(train_three(scalar) + train_three(matrix), "");
    EXPECT_EQ(scalar.layer.weight.detach().to_vector<float>(),
              matrix.layer.weight.detach().to_vector<float>());
    row.as = [](const Tensor& value) { return ops::expand(value, {2}); };
    EXPECT_EQ(
        train_three(row),
        "job: the loss is f32[2] on cpu; it must have one element: reduce it with ops::mean or ops::sum");
    none.as = [](const Tensor&) { return Tensor(); };
    expect_parts(train_three(none), {"job: the loss is (undefined)"});
  }
}

/// A job that keeps something else under that name.
struct Keeper : Square {
  explicit Keeper(const std::string& name) { keep(name, count); }
  int64_t count = 0;
};

TEST(OwnJob, NamesThatCheckpointsHaveAlreadyAreRefusedAtOnce) {
  EXPECT_EQ(message_of([] { Keeper("count"); }), "");
  expect_error([] { Keeper("model"); }, {"keep(\"model\", ...)", "kept under that name already"});
  expect_error([] { Keeper("optimizer"); }, {"keep(\"optimizer\", ...)", "train_with() keeps the optimizer"});
  for (const char* const name : {"step", "job"})
    expect_error([&] { Keeper{name}; }, {"checkpoints have an entry of that name already"});
}

/// A job with two generators.
struct Drawer : Square {
  Drawer(uint64_t seed, uint64_t other) : masks(seed), noise(other) {
    draws_from("masks", masks), draws_from("noise", noise);
  }
  Rng masks, noise;
};

TEST(OwnJob, GeneratorsOfOneSeedAreRefused) {
  EXPECT_EQ(message_of([] { Drawer(3, 4); }), "");
  expect_error([] { Drawer(3, 3); }, {"draws_from(\"noise\", ...)", "the seed 3", "different seeds"});
}

/// Jobs that forget a part of their state.
struct Forgets : Job {
  explicit Forgets(bool model) : Job(Device::cpu()) {
    train_with(optimizer);
    if (model) keep("model", layer);
  }
  void batch(uint64_t index) override {
    Rng own(index);
    own.reserve(device());  // of one that is made for the batch nothing needs to be kept
    scratch.set_state({5, index});
    scratch.reserve(device());
  }
  Tensor loss() override {
    Rng own(1);
    own.reserve(device());
    return ops::sum(dropout(layer(Tensor::full({2, 3}, 1, DType::f32, device()))));
  }
  using Job::draws_from, Job::keep;
  Rng rng{1}, masks{2}, scratch{3};
  nn::Linear layer{3, 1, rng};
  nn::Dropout dropout{0.5, masks};
  optim::Sgd optimizer{nn::parameters(layer), {.lr = 0.1}};
};

// Such a run trained, saved, and went on with other weights, or with other masks.
TEST(OwnJob, StateThatNoCheckpointWouldHaveIsRefused) {
  const TemporaryFolder root;
  report::Progress progress(report::Progress::Mode::quiet);
  const auto run = [&](Forgets& job) {
    return message_of([&] { train(job, RunFolder::create(root.path(), "r"), {.steps = 2}, progress); });
  };
  Forgets model(false), masks(true), drawn(true), kept(true);
  expect_parts(run(model), {"trains 'weight' and 1 other", "keep(\"model\", model)"});
  expect_parts(run(masks), {"loss() draws", "(seed 2)", "draws_from(\"rng\", rng)"});
  drawn.draws_from("masks", drawn.masks);
  kept.keep("masks", kept.masks);
  EXPECT_EQ(run(drawn) + run(kept), "");
}

/// An optimizer whose rate is fixed.
struct Descent {
  std::vector<nn::NamedParameter> parameters;
  void step() {
    for (const auto& [name, tensor] : parameters)
      tensor.detach().copy_from(ops::sub(tensor.detach(), ops::scale(grad(tensor), 0.1)));
  }
  void zero_grad() {
    for (const auto& parameter : parameters) tessera::zero_grad(parameter.tensor);
  }
};

struct Fixed : Job {
  Fixed() : Job(Device::cpu()) { keep("model", layer), train_with(optimizer); }
  void batch(uint64_t) override {}
  Tensor loss() override { return ops::sum(ops::mul(layer.weight, layer.weight)); }
  Rng rng{1};
  nn::Linear layer{3, 1, rng, Device::cpu(), {.bias = false}};
  Descent optimizer{nn::parameters(layer)};
};

TEST(OwnJob, AnotherProcessContinuesItsRun) {
  const TemporaryFolder root;
  report::Progress progress(report::Progress::Mode::quiet);
  const auto weights = [](Fixed& job) { return job.layer.weight.detach().to_vector<float>(); };
  Fixed whole, first, second;
  train(whole, RunFolder::create(root.path(), "whole"), {.steps = 5}, progress);
  train(first, RunFolder::create(root.path(), "parts"), {.steps = 2}, progress);
  const RunFolder again = RunFolder::open(root / "parts");  // all that a later process has
  EXPECT_EQ(train(second, again, {.steps = 5}, progress).step, 5);
  EXPECT_EQ(weights(second), weights(whole));
  again.write_settings({{"mine", 1}});
  train(second, again, {.steps = 6}, progress);
  EXPECT_EQ(again.settings().size(), 1u) << "a program's own settings stay";
  const FolderLock other = again.lock();
  expect_error([&] { train(second, again, {.steps = 7}, progress); }, {"another process is writing in it"});
}

TEST(OwnJob, AScheduleThatReachesNoOptimizerIsRefused) {
  const TemporaryFolder root;
  report::Progress progress(report::Progress::Mode::quiet);
  TrainerOptions options{.steps = 3};
  Fixed constant, scheduled;
  EXPECT_EQ(train(constant, RunFolder::create(root.path(), "a"), options, progress).step, 3);
  options.schedule = optim::Schedule({.lr = 0.1, .steps = 3});
  expect_error([&] { train(scheduled, RunFolder::create(root.path(), "b"), options, progress); },
               {"the schedule cannot reach this optimizer, which has no set_lr(double)"});
}

}  // namespace
}  // namespace tessera::train
