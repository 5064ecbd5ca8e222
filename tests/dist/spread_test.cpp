#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <map>

#include "autograd/tape.h"
#include "comm/threads.h"
#include "dist/data_parallel.h"
#include "nn/linear.h"
#include "ops/pointwise/pointwise.h"
#include "ops/reduce/reduce.h"
#include "optim/bundled.h"
#include "optim/ema.h"
#include "optim/whole_state.h"
#include "tensor/fields.h"
#include "tests/errors.h"
#include "tests/tensors.h"

// Optimizers whose states, and gradients, are spread over ranks: the same bits, the same files, less memory.

namespace tessera::dist {
namespace {

/// Weights of several norm blocks, so that ranks share one; widths that leave pads.
struct WideNet {
  explicit WideNet(DType dtype) : rng(5), a(211, 190, rng, kCpu), b(190, 3, rng, kCpu), dtype(dtype) {
    nn::to(*this, dtype);
  }
  void fields(auto&& visit) { visit("a", a), visit("b", b); }
  Tensor loss(int micro, double value = 1) const {
    Tensor x = Tensor::empty({4, 211}, DType::f32, kCpu);
    std::vector<float> values;
    for (int i = 0; i < 4 * 211; ++i)
      values.push_back(float(value * std::sin(0.37 * double(i + 91 * micro))));
    x.copy_from(Tensor::from(values, {4, 211}));
    const Tensor y = b(a(x.to(dtype)));
    return ops::mean(ops::mul(y, y));
  }
  Rng rng;
  nn::Linear a, b;
  DType dtype;
};

using Bytes = std::vector<uint8_t>;

void append(Bytes& to, const Tensor& tensor) {
  const Tensor packed = tensor.detach().to(kCpu).packed();
  const auto* const from = static_cast<const uint8_t*>(packed.raw());
  to.insert(to.end(), from, from + packed.bytes());
}

enum class Which { adamw, momentum, sgd };

optim::Optimizer make(Which which, WideNet& net, const optim::Sharding& sharding) {
  if (which == Which::adamw)
    return optim::AdamW(nn::parameters(net), {.lr = 0.01, .max_grad_norm = 0.05, .sharding = sharding});
  return optim::Sgd(nn::parameters(net), {.lr = 0.05,
                                          .momentum = which == Which::momentum ? 0.9 : 0,
                                          .weight_decay = 0.1,
                                          .sharding = sharding});
}

void step(WideNet& net, optim::Optimizer& optimizer, DataParallel& reduce, const World& world, int number,
          double value = 1) {
  constexpr int kMicroBatches = 4;
  const bool in_turn = optimizer.ring() != nullptr;
  const Share share = share_of(kMicroBatches, world.rank(), world.size(), in_turn);
  GradientTree tree(optimizer);
  optimizer.zero_grad();
  for (int k = 0; k < share.count; ++k) {
    const bool last = k + 1 == share.count && world.size() > 1;
    if (in_turn)
      reduce.overlap();
    else if (last)
      reduce.overlap([&](int64_t begin, int64_t end) {
        if (share.count > 1) tree.finish(share.count, begin, end);
      });
    Tape tape;
    tape.backward(ops::scale(net.loss(kMicroBatches * number + share.at(k), value), 1.0 / kMicroBatches));
    if (in_turn && share.count > 1) reduce.collect();
    if (share.count > 1 && (in_turn || !last)) tree.add(k, share.count);
  }
  optimizer.step();
}

/// Everything after some steps, as it would be saved.
Bytes trained_bytes(const World& world, Which which, DType dtype, const optim::Sharding& sharding,
                    int steps = 3) {
  WideNet net(dtype);
  optim::Optimizer optimizer = make(which, net, sharding);
  DataParallel reduce(optimizer, world, {.mean = false});
  for (int number = 0; number < steps; ++number) step(net, optimizer, reduce, world, number);
  Bytes all;
  for (const auto& parameter : optimizer.parameters()) append(all, parameter.tensor);
  const optim::WholeState whole(optimizer, world.host());
  if (world.leads())
    for_each_field(optimizer, [&](const std::string&, const auto& leaf) {
      if constexpr (std::is_same_v<std::decay_t<decltype(leaf)>, Tensor>) append(all, leaf);
    });
  return all;
}

struct Case {
  Which which;
  DType dtype;
};
class Spread : public ::testing::TestWithParam<Case> {};

TEST_P(Spread, HasTheBitsOfOneRank) {
  const auto [which, dtype] = GetParam();
  const Bytes alone = trained_bytes(World(), which, dtype, {});
  for (const int ranks : {2, 4})
    for (const double bucket_mb : {1e-6, 0.05, 10.0})
      for (const bool gradients : {false, true})
        comm::run_threads(ranks, [&](comm::Communicator& c) {
          const Bytes own = trained_bytes(World(c, c), which, dtype, {c.rank(), ranks, bucket_mb, gradients});
          ASSERT_GE(own.size(), c.rank() == 0 ? alone.size() : 1u);
          EXPECT_TRUE(std::equal(own.begin(), own.end(), alone.begin()))
              << ranks << " ranks, rank " << c.rank() << ", buckets of " << bucket_mb << ", stage "
              << (gradients ? 2 : 1);
        });
}

INSTANTIATE_TEST_SUITE_P(Optimizers, Spread,
                         ::testing::Values(Case{Which::adamw, DType::f32}, Case{Which::adamw, DType::bf16},
                                           Case{Which::momentum, DType::f32}, Case{Which::sgd, DType::f16},
                                           Case{Which::adamw, DType::f64}));

TEST(SpreadStates, EachRankHoldsItsShareOfTheStates) {
  WideNet net(DType::bf16);
  const auto states = [&](const optim::Sharding& sharding) {
    const optim::Optimizer optimizer = make(Which::adamw, net, sharding);
    return int64_t(optimizer.bytes() - optimizer.gradients().bytes());
  };
  const int64_t whole = states({});
  int64_t sum = 0;
  for (int part = 0; part < 3; ++part) {
    const int64_t own = states({part, 3});
    sum += own;
    // But for norm blocks of 64 KiB, of each of three states.
    EXPECT_LE(own, whole / 3 + 3 * 65536) << part;
  }
  EXPECT_EQ(sum, whole);
}

using File = std::map<std::string, Tensor>;

template <class Thing>
void for_each_tensor(Thing& thing, const std::function<void(const std::string&, const Tensor&)>& f) {
  for_each_field(thing, [&](const std::string& name, const auto& leaf) {
    if constexpr (std::is_same_v<std::decay_t<decltype(leaf)>, Tensor>) f(name, leaf);
  });
}

/// Two steps from the file, if there is one; what rank 0 would save after them.
File two_steps(const World& world, const optim::Sharding& sharding, const File& from) {
  WideNet net(DType::bf16);
  optim::Optimizer optimizer = make(Which::adamw, net, sharding);
  if (!from.empty()) {
    const optim::WholeState whole(optimizer);
    const auto load = [&](const std::string& name, const Tensor& leaf) {
      leaf.detach().copy_from(from.at(name));
    };
    for_each_tensor(net, load), for_each_tensor(optimizer, load);
    whole.take();
  }
  DataParallel reduce(optimizer, world, {.mean = false});
  for (int number = 0; number < 2; ++number)
    step(net, optimizer, reduce, world, from.empty() ? number : number + 2);
  const optim::WholeState whole(optimizer, world.host());
  File file;
  const auto save = [&](const std::string& name, const Tensor& leaf) { file[name] = leaf.detach().clone(); };
  if (world.leads()) for_each_tensor(net, save), for_each_tensor(optimizer, save);
  return file;
}

class SpreadFiles : public ::testing::TestWithParam<int> {};  // the stage of the first part

TEST_P(SpreadFiles, AreReadByAnyNumberOfRanks) {
  const auto on = [](int ranks, const File& from, int stage) {
    if (ranks == 1) return two_steps(World(), {}, from);
    File file;
    comm::run_threads(ranks, [&](comm::Communicator& c) {
      File own =
          two_steps(World(c, c),
                    stage > 0 ? optim::Sharding{c.rank(), ranks, 0.05, stage == 2} : optim::Sharding{}, from);
      if (c.rank() == 0) file = std::move(own);
    });
    return file;
  };
  const auto bytes = [](const File& file) {
    Bytes all;
    for (const auto& [name, tensor] : file) append(all, tensor);
    return all;
  };
  const File half = on(1, {}, 0), end = on(1, half, 0);
  EXPECT_GT(half.size(), 10u);
  const int stage = GetParam(), next = (stage + 1) % 3;
  for (const auto& [before, after] : {std::pair(2, 1), {1, 4}, {4, 2}}) {
    const File file = on(before, {}, stage);
    EXPECT_TRUE(bytes(file) == bytes(half)) << before << " ranks";
    EXPECT_TRUE(bytes(on(after, file, next)) == bytes(end)) << before << " ranks, then " << after;
  }
}

INSTANTIATE_TEST_SUITE_P(Stage, SpreadFiles, ::testing::Values(0, 1, 2));

class SpreadSkips : public ::testing::TestWithParam<bool> {};  // whether gradients are spread, too

TEST_P(SpreadSkips, AllSkipAStepThatIsNotFiniteOnOne) {
  comm::run_threads(2, [](comm::Communicator& c) {
    const World world(c, c);
    WideNet net(DType::f32);
    optim::Optimizer optimizer = make(Which::adamw, net, {c.rank(), 2, 0.05, GetParam()});
    DataParallel reduce(optimizer, world, {.mean = false});
    Bytes before, after;
    for (const auto& parameter : optimizer.parameters()) append(before, parameter.tensor);
    step(net, optimizer, reduce, world, 0, c.rank() == 1 ? std::numeric_limits<double>::infinity() : 1);
    for (const auto& parameter : optimizer.parameters()) append(after, parameter.tensor);
    EXPECT_EQ(optimizer.skipped(), 1);
    EXPECT_TRUE(before == after);
    step(net, optimizer, reduce, world, 1);
    EXPECT_EQ(optimizer.steps(), 1);
  });
}

INSTANTIATE_TEST_SUITE_P(Gradients, SpreadSkips, ::testing::Bool());

TEST(SpreadStates, AveragesOfWeightsWithoutMastersAreThoseOfOneRank) {
  const auto averages = [](const World& world, const optim::Sharding& sharding) {
    WideNet net(DType::f32);
    optim::Optimizer optimizer = make(Which::adamw, net, sharding);
    DataParallel reduce(optimizer, world, {.mean = false});
    optim::Ema ema(optimizer, {.decay = 0.5});
    Bytes all;
    for (int number = 0; number < 3; ++number) {
      step(net, optimizer, reduce, world, number);
      ema.update();
      ema.apply();
      append(all, net.a.weight);
      ema.restore();
    }
    for (size_t i = 0; i < optimizer.parameters().size(); ++i) append(all, ema.average(i));
    append(all, net.a.weight);
    return all;
  };
  const Bytes alone = averages(World(), {});
  for (const bool gradients : {false, true})
    comm::run_threads(2, [&](comm::Communicator& c) {
      EXPECT_TRUE(averages(World(c, c), {c.rank(), 2, 0.05, gradients}) == alone) << gradients;
    });
}

TEST(SpreadStates, WhatCannotBeSpreadIsRefused) {
  WideNet net(DType::f32);
  expect_error(
      [&] {
        optim::make_optimizer("muon", nn::parameters(net), {.sharding = {0, 2}});
      },
      {"muon", "cannot be spread over ranks", "adamw or sgd"});
  expect_error([&] { make(Which::adamw, net, {2, 2}); }, {"part 2 of 2"});
  optim::Optimizer optimizer = make(Which::adamw, net, {0, 2});
  WideNet narrow(DType::bf16);
  const optim::Optimizer masters = make(Which::adamw, narrow, {0, 2});
  expect_error([&] { optim::Ema ema(masters); }, {"Ema: the master of a.weight", "spread over 2 ranks"});
  expect_error([&] { optimizer.step(); }, {"spread over 2 ranks", "dist::DataParallel"});
  expect_error([&] { for_each_field(optimizer, [](const std::string&, const auto&) {}); },
               {"spread over 2 ranks", "WholeState"});
  comm::run_threads(3, [&](comm::Communicator& c) {
    WideNet own(DType::f32);
    optim::Optimizer half = make(Which::adamw, own, {c.rank() % 2, 2});
    expect_error([&] { DataParallel(half, World(c, c)); }, {"of 3 joins", "of 2"});
  });
}

}  // namespace
}  // namespace tessera::dist
