#include "optim/coverage.h"

#include <gtest/gtest.h>

#include "autograd/checkpoint.h"
#include "nn/linear.h"
#include "ops/pointwise/pointwise.h"
#include "ops/reduce/reduce.h"
#include "optim/adamw.h"
#include "optim/sgd.h"
#include "tests/errors.h"
#include "tests/tensors.h"

namespace tessera::optim {
namespace {

/// A model that forgets a part.
struct Forgetful {
  explicit Forgetful(Rng& rng) : listed(2, 3, rng), forgotten(3, 5, rng) {}
  Tensor operator()(const Tensor& x) const { return ops::sum(ops::square(forgotten(listed(x)))); }
  void fields(auto&& visit) { visit("listed", listed); }
  nn::Linear listed, forgotten;
};

Tensor two_rows_of_ones() {
  return Tensor::full({2, 2}, 1, DType::f32, kCpu);
}

TEST(CheckCovers, NamesTheLeavesOfAForgottenPartAndWhoUsedThem) {
  Rng rng(1);
  const Forgetful model(rng);
  AdamW optimizer(nn::parameters(model));
  Tape tape;
  const Tensor loss = model(two_rows_of_ones());
  const std::string said = message_of([&] { check_covers(tape, {&optimizer}); });
  expect_parts(
      said, {"optim::check_covers: 2 leaves get a gradient but belong to no optimizer", "fields()",
             "\n  [5, 3] on cpu, first used by linear; called at ", "coverage_test.cpp:", "\n  [5] on cpu"});
  EXPECT_EQ(said.find("[3, 2]"), std::string::npos) << said;
  tape.backward(loss);  // the check leaves the tape as it is
  EXPECT_TRUE(grad(model.forgotten.weight).defined());
}

TEST(CheckCovers, IsSilentIfEachBelongsToOneOfTheOptimizers) {
  Rng rng(1);
  const Forgetful model(rng);
  AdamW optimizer(nn::parameters(model));
  Sgd rest(nn::parameters(model.forgotten));
  Tensor x = two_rows_of_ones();
  require_grad(x);
  Tape tape;
  const Tensor loss = model(x);
  check_covers(tape, {&optimizer, &rest}, {x});
  expect_error([&] { check_covers(tape, {&optimizer, &rest}); }, {"1 leaf gets", "[2, 2] on cpu"});
  tape.backward(loss);
}

TEST(CheckCovers, SeesIntoCheckpointedParts) {
  Rng rng(1);
  const nn::Linear layer(2, 2, rng);
  nn::Linear other(2, 2, rng);
  AdamW optimizer(nn::parameters(layer));
  Tape tape;
  const Tensor y = checkpoint([&](const Tensor& v) { return other(v); }, layer(two_rows_of_ones()));
  expect_error([&] { check_covers(tape, {&optimizer}); }, {"2 leaves", "[2, 2] on cpu", "checkpoint"});
}

TEST(CheckCovers, WantsATapeThatHasRecorded) {
  Rng rng(1);
  const nn::Linear layer(2, 2, rng);
  AdamW optimizer(nn::parameters(layer));
  Tape tape;
  expect_error([&] { check_covers(tape, {&optimizer}); }, {"optim::check_covers", "no entries"});
  const Tensor loss = ops::sum(layer(two_rows_of_ones()));
  check_covers(tape, {&optimizer});
  tape.backward(loss);
  expect_error([&] { check_covers(tape, {&optimizer}); }, {"no entries"});
}

TEST(CheckCovers, ListsTenLines) {
  std::vector<Tensor> leaves(13, Tensor());
  Tensor sum;
  Tape tape;
  for (Tensor& leaf : leaves) {
    leaf = Tensor::full({3}, 1, DType::f32, kCpu);
    require_grad(leaf);
    sum = sum.defined() ? ops::add(sum, leaf) : ops::scale(leaf, 2);
  }
  const std::string said = message_of([&] { check_covers(tape, {}); });
  expect_parts(said, {"13 leaves", "\n  and more"});
  EXPECT_EQ(std::count(said.begin(), said.end(), '\n'), 11);
}

}  // namespace
}  // namespace tessera::optim
