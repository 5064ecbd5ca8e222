#include "nn/drop_bp.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <set>

#include "autograd/checkpoint.h"
#include "models/bert.h"
#include "models/gpt.h"
#include "models/llama.h"
#include "nn/low_rank.h"
#include "ops/pointwise/pointwise.h"
#include "ops/random/random.h"
#include "ops/reduce/reduce.h"
#include "runtime/allocator.h"
#include "tests/errors.h"
#include "tests/tensors.h"

namespace tessera::nn {
namespace {

Tensor random_normal(const Shape& shape, Rng& rng) {
  const Tensor tensor = Tensor::empty(shape, DType::f64, kCpu);
  ops::fill_normal(tensor, 0, 1, rng);
  return tensor;
}

/// x + second(x'), x' = x + first(x): two residual branches, the first fused with its residual.
struct Stream {
  explicit Stream(Rng& rng)
      : first(4, 6, rng, kCpu, {.activation = ops::Activation::gelu, .dtype = DType::f64}),
        second(4, 5, rng, kCpu, {.activation = ops::Activation::gelu, .dtype = DType::f64}) {}
  Tensor operator()(const Tensor& x) const {
    const Tensor middle = first(x, x);
    return ops::add(middle, second(middle));
  }
  void fields(auto&& visit) { visit("first", first), visit("second", second); }

  Mlp first, second;
};

/// The output, and the gradients of x and of all parameters, for the sum of squares of the output.
struct Outcome {
  std::vector<double> y, dx;
  std::vector<std::vector<double>> parameters;
};
template <class Model, class Run>
Outcome outcome(const Model& model, const Tensor& x_given, Run&& run) {
  nn::zero_grad(model);
  Tensor x = x_given.detach();
  require_grad(x);
  Outcome all;
  Tape tape;
  const Tensor y = run(x);
  tape.backward(ops::sum(ops::mul(y, y)));
  all.y = values_if_defined(y), all.dx = values_if_defined(grad(x));
  for (const NamedParameter& parameter : parameters(model))
    all.parameters.push_back(values_if_defined(grad(parameter.tensor)));
  return all;
}

// What PyTorch's module does to a branch: its output's gradient goes nowhere.
Tensor cut(const Tensor& x) {
  return x.detach();
}

TEST(DropBP, ADroppedBranchIsTheConstantThatItComputes) {
  Rng rng(3);
  const Stream model(rng);
  const Tensor x = random_normal({5, 4}, rng);
  DropBP drops(model, 1);
  ASSERT_EQ(drops.size(), 2u);
  EXPECT_EQ(drops.branches()[0].name, "first");
  EXPECT_EQ(drops.branches()[1].name, "second");
  EXPECT_EQ(drops.branches()[1].flops, 2 * 2 * 4 * 5);
  const Outcome whole = outcome(model, x, model);
  for (const bool first : {false, true})
    for (const bool second : {false, true}) {
      drops.set_dropped({false, false});
      const Outcome expected = outcome(model, x, [&](const Tensor& in) {
        const Tensor branch = model.first(in), middle = ops::add(first ? cut(branch) : branch, in);
        const Tensor other = model.second(middle);
        return ops::add(middle, second ? cut(other) : other);
      });
      drops.set_dropped({first, second});
      const Outcome got = outcome(model, x, model);
      EXPECT_EQ(got.y, whole.y) << "forward does not change";
      ASSERT_EQ(got.parameters.size(), expected.parameters.size());
      for (size_t i = 0; i < got.dx.size(); ++i) EXPECT_NEAR(got.dx[i], expected.dx[i], 1e-12);
      for (size_t p = 0; p < got.parameters.size(); ++p) {
        ASSERT_EQ(got.parameters[p].size(), expected.parameters[p].size()) << first << second << p;
        for (size_t i = 0; i < got.parameters[p].size(); ++i)
          EXPECT_NEAR(got.parameters[p][i], expected.parameters[p][i], 1e-12) << first << second << p;
      }
      EXPECT_EQ(got.parameters[0].empty(), first);
      EXPECT_EQ(got.parameters[4].empty(), second);
    }
}

TEST(DropBP, ACheckpointedBranchStaysDroppedWhenItRunsAgain) {
  Rng rng(4);
  const Stream model(rng);
  const Tensor x = random_normal({5, 4}, rng);
  DropBP drops(model, 1);
  drops.set_dropped({true, false});
  const Outcome plain = outcome(model, x, model);
  const Outcome again = outcome(
      model, x, [&](const Tensor& in) { return checkpoint([&](const Tensor& t) { return model(t); }, in); });
  EXPECT_EQ(again.dx, plain.dx);
  EXPECT_EQ(again.parameters, plain.parameters);
}

TEST(DropBP, EndsWithTheObjectAndKnowsItsModelAlone) {
  Rng rng(5);
  const Stream model(rng), other(rng);
  const Tensor x = random_normal({5, 4}, rng);
  const Outcome whole = outcome(model, x, model), of_other = outcome(other, x, other);
  {
    DropBP drops(model, 1), more(other, 1);
    drops.set_dropped({true, true});
    EXPECT_EQ(outcome(other, x, other).dx, of_other.dx);
    EXPECT_NE(outcome(model, x, model).dx, whole.dx);
    { const DropBP third(other, 1); }
    EXPECT_NE(outcome(model, x, model).dx, whole.dx) << "one of them has ended";
    more.set_dropped({true, true});
    EXPECT_EQ(outcome(model, x, model).dx.size(), whole.dx.size());
  }
  EXPECT_EQ(outcome(model, x, model).dx, whole.dx);
  EXPECT_EQ(outcome(model, x, model).parameters, whole.parameters);
}

TEST(DropBP, FindsTheBranchesOfEveryModel) {
  Rng rng(6);
  const models::Bert bert(
      {.vocabulary = 11, .positions = 8, .d_model = 8, .d_ff = 16, .heads = 2, .layers = 3}, rng, kCpu);
  const models::Gpt gpt({.vocabulary = 11, .positions = 8, .d_model = 8, .d_ff = 16, .heads = 2, .layers = 2},
                        rng, kCpu);
  const models::Llama llama(
      {.vocabulary = 11, .d_model = 8, .d_ff = 12, .heads = 2, .kv_heads = 2, .layers = 2}, rng, kCpu);
  const DropBP of_bert(bert, 10), of_gpt(gpt, 10), of_llama(llama, 10);
  EXPECT_EQ(of_bert.size(), 6u);
  EXPECT_EQ(of_gpt.size(), 4u);
  EXPECT_EQ(of_llama.size(), 4u);
  EXPECT_EQ(of_bert.branches()[2].name, "blocks.1.attention");
  EXPECT_EQ(of_bert.branches()[2].flops, 8 * 8 * 8 + 4 * 8 * 10);  // 8 h^2 + 4 h s
  EXPECT_EQ(of_bert.branches()[3].name, "blocks.1.mlp");
  EXPECT_EQ(of_bert.branches()[3].flops, 4 * 8 * 16);
}

// Layers of factors have no dense weight to count.
TEST(DropBP, CountsTheFlopsOfFactors) {
  Rng rng(6);
  models::Bert bert({.vocabulary = 11, .positions = 8, .d_model = 8, .d_ff = 16, .heads = 2, .layers = 1},
                    rng, kCpu);
  auto& block = bert.blocks[0];
  for (Linear* const layer : {&block.attention.out, &block.mlp.up, &block.mlp.down})
    factorize(*layer, {layer->out}, {.kind = FactorKind::low_rank, .rank = 2}, rng);
  factorize(block.attention.qkv, {8, 8, 8}, {.kind = FactorKind::low_rank, .rank = 2}, rng);
  const DropBP drops(bert, 10);
  const double attention = drops.branches()[0].flops, network = drops.branches()[1].flops;
  EXPECT_EQ(attention, 2 * (3 * 2 * (8 + 8) + 2 * (8 + 8)) + 4 * 8 * 10);
  EXPECT_EQ(network, 2 * 2 * 2 * (8 + 16));
}

TEST(DropBP, ALanguageModelTrainsThroughTheStreamThatIsLeft) {
  Rng rng(7);
  const models::Llama llama(
      {.vocabulary = 11, .d_model = 8, .d_ff = 12, .heads = 2, .kv_heads = 2, .layers = 2}, rng, kCpu);
  const Tensor tokens = Tensor::from(std::vector<int64_t>{1, 2, 3, 4, 5, 6}, {6}),
               targets = Tensor::from(std::vector<int64_t>{2, 3, 4, 5, 6, 7}, {6});
  const auto loss_and_arrived = [&] {
    nn::zero_grad(llama);
    Tape tape;
    const Tensor loss = llama.loss(tokens, targets, Sequences{{3, 3}});
    tape.backward(loss);
    std::set<std::string> names;
    for (const NamedParameter& parameter : parameters(llama))
      if (grad(parameter.tensor).defined()) names.insert(parameter.name);
    return std::pair{loss.item<double>(), names};
  };
  DropBP drops(llama, 3);
  const auto [whole, all] = loss_and_arrived();
  drops.set_dropped({false, true, true, false});
  const auto [same, some] = loss_and_arrived();
  EXPECT_EQ(whole, same);
  for (const std::string& name : all) {
    const bool dropped = name.starts_with("blocks.0.mlp") || name.starts_with("blocks.1.attention");
    const bool in_norm = name.find("norm") != std::string::npos;
    if (!in_norm) EXPECT_EQ(some.contains(name), !dropped) << name;
  }
}

TEST(DropBP, ADroppedBranchSavesNothing) {
  Rng rng(8);
  const Mlp mlp(64, 256, rng, kCpu, {.activation = ops::Activation::gelu});
  const Tensor x = random_normal({128, 64}, rng).to(DType::f32);
  const auto saved = [&] {
    Tape tape;
    Allocator& memory = kCpu.allocator();
    const size_t before = memory.stats().allocated;
    const Tensor y = mlp(x);
    return memory.stats().allocated - before - size_t(y.count()) * 4;
  };
  DropBP drops(mlp, 1);
  const size_t whole = saved();
  drops.set_dropped({true});
  EXPECT_GE(whole, size_t(128 * 256 * 4));
  EXPECT_LE(double(saved()), 0.01 * double(whole));
}

TEST(DropBP, DrawsByRateAndForcesTheRestInTheOrderOfRates) {
  Rng rng(9);
  const models::Bert bert(
      {.vocabulary = 11, .positions = 8, .d_model = 8, .d_ff = 16, .heads = 2, .layers = 6}, rng, kCpu);
  DropBP drops(bert, 4);
  std::vector<double> rates(drops.size());
  for (size_t i = 0; i < rates.size(); ++i) rates[i] = 0.05 * double(i);
  drops.set_rates(rates);
  std::vector<int> hits(rates.size());
  int both = 0;
  constexpr int kSteps = 20000;
  for (uint64_t step = 0; step < kSteps; ++step) {
    drops.draw(0, 42, step);
    for (size_t i = 0; i < rates.size(); ++i) hits[i] += drops.dropped()[i];
    both += drops.dropped()[10] && drops.dropped()[11];
  }
  for (size_t i = 0; i < rates.size(); ++i)
    EXPECT_NEAR(double(hits[i]) / kSteps, rates[i], 4 * std::sqrt(0.25 / kSteps)) << i;
  EXPECT_NEAR(double(both) / kSteps, rates[10] * rates[11], 4 * std::sqrt(0.25 / kSteps)) << "independent";
  drops.draw(0, 42, 7);
  const std::vector<bool> seventh = drops.dropped();
  drops.draw(0, 42, 8);
  drops.draw(0, 42, 7);
  EXPECT_EQ(drops.dropped(), seventh) << "a function of seed and step";
  drops.draw(0, 43, 7);
  EXPECT_NE(drops.dropped(), seventh);

  // None is drawn by itself: the forced ones are those of the highest rates, and no more than it takes.
  std::vector<double> tiny(rates.size(), 0.0);
  tiny[3] = tiny[8] = 1e-12;
  drops.set_rates(tiny);
  drops.draw(0.2, 1, 1);
  EXPECT_TRUE(drops.dropped()[3] && drops.dropped()[8]);
  EXPECT_GE(drops.dropped_share(), 0.2 - 1e-9);
  const std::vector<bool> forced = drops.dropped();
  double least = 1;
  for (size_t i = 0; i < forced.size(); ++i) {
    if (!forced[i] || i == 3 || i == 8) continue;
    std::vector<bool> fewer = forced;
    fewer[i] = false;
    drops.set_dropped(fewer);
    least = std::min(least, drops.dropped_share());
  }
  EXPECT_LT(least, 0.2);
  drops.set_dropped(std::vector(drops.size(), true));
  EXPECT_EQ(drops.dropped_share(), 1);
}

TEST(DropBP, ForcesBranchesOfEqualRatesEquallyOften) {
  Rng rng(9);
  const models::Bert bert(
      {.vocabulary = 11, .positions = 8, .d_model = 8, .d_ff = 16, .heads = 2, .layers = 6}, rng, kCpu);
  DropBP drops(bert, 4);
  for (const double rate : {0.0, 0.5, 0.875}) {
    drops.set_rates(std::vector(drops.size(), rate));
    constexpr int kSteps = 8000;
    std::map<double, std::vector<double>> shares;  // by FLOPs: attention layers, feed-forward networks
    std::vector<int> hits(drops.size());
    for (uint64_t step = 0; step < kSteps; ++step) {
      drops.draw(0.875, 42, step);
      EXPECT_GE(drops.dropped_share(), 0.875 - 1e-9);
      for (size_t i = 0; i < hits.size(); ++i) hits[i] += drops.dropped()[i];
    }
    for (size_t i = 0; i < hits.size(); ++i)
      shares[drops.branches()[i].flops].push_back(double(hits[i]) / kSteps);
    ASSERT_EQ(shares.size(), 2u);
    for (const auto& [flops, list] : shares)
      for (const double share : list)
        EXPECT_NEAR(share, list[0], 4.5 * std::sqrt(2 * 0.25 / kSteps)) << "rate " << rate;
  }
}

TEST(AllocateDropRates, GivesTheTenthsToWhatHarmsLeast) {
  EXPECT_EQ(allocate_drop_rates({1, 1, 1, 1}, {1, 1, 1, 1}, 0.5), (std::vector<int>{5, 5, 5, 5}));
  EXPECT_EQ(allocate_drop_rates({100, 1}, {1, 1}, 0.5), (std::vector<int>{1, 9}));
  EXPECT_EQ(allocate_drop_rates({2, 1}, {1, 1}, 0.3), (std::vector<int>{2, 4}));
  EXPECT_EQ(allocate_drop_rates({1, 2}, {1, 1}, 0.25), (std::vector<int>{4, 1}))
      << "by the rate after the tenth";
  EXPECT_EQ(allocate_drop_rates({1, 1}, {1, 1}, 0.9), (std::vector<int>{9, 9}))
      << "the highest that can be reached";
  EXPECT_EQ(allocate_drop_rates({0, 0, 0}, {3, 1, 1}, 0.05), (std::vector<int>{1, 0, 0}));
  EXPECT_EQ(allocate_drop_rates({5, 5}, {1, 1}, 0), (std::vector<int>{0, 0}));
  for (const double target : {0.1, 0.15, 0.33, 0.5, 0.875, 0.9}) {
    const std::vector<double> flops{8, 16, 8, 16, 8, 16}, harm{3, 1, 4, 1, 5, 9};
    const std::vector<int> tenths = allocate_drop_rates(harm, flops, target);
    double dropped = 0;
    for (size_t i = 0; i < flops.size(); ++i) dropped += flops[i] * tenths[i] / 10;
    EXPECT_GE(dropped, target * 72 - 1e-9);
    EXPECT_LE(dropped, target * 72 + 1.6 + 1e-9) << "at most a tenth of one branch more";
  }
}

TEST(DropBP, SaysWhatIsWrong) {
  Rng rng(10);
  const Stream model(rng);
  DropBP drops(model, 1);
  const Linear none(2, 2, rng);
  EXPECT_NE(message_of([&] { const DropBP nothing(none, 1); }).find("no residual branch"), std::string::npos);
  EXPECT_NE(message_of([&] { drops.set_rates({0.5}); }).find("1 rates for 2 branches"), std::string::npos);
  EXPECT_NE(message_of([&] {
              drops.set_rates({0.5, 1.5});
            }).find("rate of second is 1.5"),
            std::string::npos);
  EXPECT_NE(message_of([&] { drops.set_dropped({true}); }).find("1 decisions for 2"), std::string::npos);
  EXPECT_NE(message_of([&] { drops.draw(1.2, 1, 1); }).find("at least 1.2"), std::string::npos);
  EXPECT_NE(message_of([&] { allocate_drop_rates({1}, {1}, 0.95); }).find("expected 0 to 0.9"),
            std::string::npos);
  EXPECT_NE(message_of([&] {
              allocate_drop_rates({1}, {1, 1}, 0.5);
            }).find("one of each per branch"),
            std::string::npos);
  EXPECT_NE(message_of([&] { allocate_drop_rates({NAN}, {1}, 0.5); }).find("branch 0 has sensitivity"),
            std::string::npos);
}

}  // namespace
}  // namespace tessera::nn
