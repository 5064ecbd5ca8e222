#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>

#include "autograd/tape.h"
#include "comm/threads.h"
#include "models/tnp.h"
#include "ops/random/random.h"
#include "tests/errors.h"

// One task on several ranks: losses and gradients of every parameter are shares of those of one rank.

namespace tessera::models {
namespace {

using By = nn::AttentionSplit::By;

struct SplitCase {
  int ranks;
  By by;
  int64_t context, targets;
  bool pre_norm = false;
  int64_t checkpoint_every = 0;
};

TnpConfig config_of(const SplitCase& c, DType dtype) {
  return {.features = 2,
          .d_model = 24,
          .d_ff = 20,
          .heads = 4,
          .layers = 3,
          .components = 2,
          .embed_hidden = 10,
          .pre_norm = c.pre_norm,
          .checkpoint_every = c.checkpoint_every,
          .dtype = dtype};
}

TnpBatch batch_of(const SplitCase& c, DType dtype) {
  Rng rng(5);
  const auto random = [&](int64_t points, int64_t width) {
    const Tensor tensor = Tensor::empty({3, points, width}, DType::f64, Device::cpu());
    ops::fill_normal(tensor, 0, 1, rng);
    return tensor.to(dtype == DType::f64 ? DType::f64 : DType::f32);
  };
  return {random(c.context, 2), random(c.context, 1), random(c.targets, 2), random(c.targets, 1)};
}

struct Computed {
  double loss = 0;
  std::map<std::string, std::vector<double>> gradients;
  std::vector<double> points;  // point_losses

  void add(const Computed& other) {
    loss += other.loss;
    for (const auto& [name, values] : other.gradients) {
      std::vector<double>& own = gradients[name];
      own.resize(values.size());
      for (size_t i = 0; i < values.size(); ++i) own[i] += values[i];
    }
  }
};

Computed compute(const TnpConfig& config, const TnpBatch& batch) {
  Rng rng(1);
  const Tnp model(config, rng, Device::cpu());
  const std::vector<nn::NamedParameter> parameters = nn::parameters(model);
  Computed result;
  result.points = model.point_losses(batch).to_vector<double>();
  Tape tape;
  const Tensor loss = model.loss(batch);
  result.loss = loss.item<double>();
  tape.backward(loss);
  for (const auto& [name, tensor] : parameters) result.gradients[name] = grad(tensor).to_vector<double>();
  return result;
}

/// The sum of what the ranks computed, and rank 0's targets' losses.
Computed compute_split(const SplitCase& c, const TnpConfig& config, const TnpBatch& batch) {
  std::vector<Computed> all(size_t(c.ranks));
  comm::run_threads(c.ranks, [&](comm::Communicator& group) {
    const auto split = std::make_shared<const TnpSplit>(group, c.by, c.context, c.targets);
    all[size_t(group.rank())] = compute(config, part_of(batch, split));
  });
  Computed sum;
  for (const Computed& one : all) sum.add(one);
  sum.points = all[0].points;
  return sum;
}

double largest(const std::vector<double>& values) {
  double most = 0;
  for (const double value : values) most = std::max(most, std::abs(value));
  return most;
}

/// Each parameter's gradient to `tolerance` of its largest element.
void expect_equal(const Computed& got, const Computed& expected, double tolerance) {
  EXPECT_NEAR(got.loss, expected.loss, tolerance * std::abs(expected.loss));
  ASSERT_EQ(got.gradients.size(), expected.gradients.size());
  for (const auto& [name, values] : expected.gradients) {
    const std::vector<double>& ours = got.gradients.at(name);
    ASSERT_EQ(ours.size(), values.size());
    double error = 0;
    for (size_t i = 0; i < values.size(); ++i) error = std::max(error, std::abs(ours[i] - values[i]));
    EXPECT_GT(largest(values), 0) << name;
    EXPECT_LE(error, tolerance * largest(values)) << name;
  }
}

class TnpOnRanks : public ::testing::TestWithParam<SplitCase> {};

/// f64: a few hundred additions in another order, of numbers with 53 bits.
TEST_P(TnpOnRanks, HasTheLossAndGradientsOfOne) {
  const SplitCase c = GetParam();
  const TnpConfig config = config_of(c, DType::f64);
  const TnpBatch batch = batch_of(c, DType::f64);
  const Computed one = compute(config, batch), split = compute_split(c, config, batch);
  expect_equal(split, one, 1e-12);
  // Rank 0's targets are the first ones of each task.
  const int64_t own = c.targets / c.ranks;
  ASSERT_EQ(int64_t(split.points.size()), 3 * own);
  for (int64_t task = 0; task < 3; ++task)
    for (int64_t n = 0; n < own; ++n)
      EXPECT_NEAR(split.points[size_t(task * own + n)], one.points[size_t(task * c.targets + n)], 1e-12);
}

/// f32 has 24 bits; the order of its sums costs a few of them.
TEST_P(TnpOnRanks, HasThemInF32) {
  const SplitCase c = GetParam();
  const TnpConfig config = config_of(c, DType::f32);
  const TnpBatch batch = batch_of(c, DType::f32);
  expect_equal(compute_split(c, config, batch), compute(config, batch), 1e-5);
}

std::string name_of_case(const ::testing::TestParamInfo<SplitCase>& info) {
  const SplitCase& c = info.param;
  return std::string(nn::name_of(c.by)) + "_" + std::to_string(c.ranks) + "_ranks_" +
         std::to_string(c.context) + "_" + std::to_string(c.targets) + (c.pre_norm ? "_pre_norm" : "") +
         (c.checkpoint_every > 0 ? "_checkpointed" : "");
}

INSTANTIATE_TEST_SUITE_P(Of, TnpOnRanks,
                         ::testing::Values(SplitCase{1, By::rows, 6, 4}, SplitCase{1, By::heads, 6, 4},
                                           SplitCase{2, By::rows, 8, 4}, SplitCase{2, By::heads, 8, 4},
                                           SplitCase{2, By::rows, 7, 5}, SplitCase{2, By::heads, 7, 5},
                                           SplitCase{3, By::rows, 8, 5, true}, SplitCase{4, By::rows, 7, 5},
                                           SplitCase{4, By::heads, 7, 5},
                                           SplitCase{4, By::rows, 4, 4, true, 2},
                                           SplitCase{2, By::heads, 5, 7, true, 1},
                                           SplitCase{2, By::rows, 5, 7, false, 1}),
                         name_of_case);

/// What a group of one rank computes is the dense model, bit for bit: the split changes nothing but where
/// tokens lie.
TEST(TnpSplit, OfOneRankHasTheBitsOfTheDenseModel) {
  for (const By by : {By::rows, By::heads}) {
    const SplitCase c{1, by, 6, 4};
    const TnpConfig config = config_of(c, DType::bf16);
    const TnpBatch batch = batch_of(c, DType::bf16);
    const Computed one = compute(config, batch), split = compute_split(c, config, batch);
    EXPECT_EQ(split.loss, one.loss);
    EXPECT_EQ(split.points, one.points);
    EXPECT_EQ(split.gradients, one.gradients);
  }
}

/// The same twice: no sum depends on timing.
TEST(TnpSplit, HasFixedBits) {
  for (const By by : {By::rows, By::heads}) {
    const SplitCase c{4, by, 7, 5};
    const TnpConfig config = config_of(c, DType::bf16);
    const TnpBatch batch = batch_of(c, DType::bf16);
    const Computed first = compute_split(c, config, batch), second = compute_split(c, config, batch);
    EXPECT_EQ(first.loss, second.loss);
    EXPECT_EQ(first.gradients, second.gradients);
  }
}

TEST(TnpSplit, RefusesWhatCannotBeDivided) {
  const auto split_of = [](By by, int64_t context, int64_t targets) {
    return message_of([&] {
      comm::run_threads(3, [&](comm::Communicator& group) {
        const SplitCase c{3, by, context, targets};
        const TnpConfig config = config_of(c, DType::f32);
        const TnpBatch batch = batch_of(c, DType::f32);
        compute(config, part_of(batch, std::make_shared<TnpSplit>(group, by, context, targets)));
      });
    });
  };
  expect_parts(split_of(By::rows, 2, 4), {"2 rows on 3 ranks"});
  expect_parts(split_of(By::rows, 4, 2), {"2 rows on 3 ranks"});
  expect_parts(split_of(By::heads, 4, 4), {"heads that 3 ranks divide"});
  EXPECT_EQ(split_of(By::rows, 4, 4), "");
  expect_parts(message_of([] { nn::parse_attention_split("columns"); }), {"\"columns\"", "rows or heads"});
}

}  // namespace
}  // namespace tessera::models
