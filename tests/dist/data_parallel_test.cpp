#include "dist/data_parallel.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "autograd/tape.h"
#include "comm/threads.h"
#include "nn/linear.h"
#include "ops/pointwise/pointwise.h"
#include "ops/reduce/reduce.h"
#include "optim/adamw.h"
#include "tests/errors.h"

namespace tessera::dist {
namespace {

const Device kCpu = Device::cpu();

struct Net {
  explicit Net(uint64_t seed) : rng(seed), a(3, 5, rng, kCpu), b(5, 2, rng, kCpu) {}
  void fields(auto&& visit) { visit("a", a), visit("b", b); }
  Tensor loss(const Tensor& x) const { return ops::mean(ops::mul(b(a(x)), b(a(x)))); }
  Rng rng;
  nn::Linear a, b;
};

Tensor data_of(int micro, double value = 1) {
  const Tensor x = Tensor::zeros({4, 3}, DType::f32, kCpu);
  for (int64_t i = 0; i < 4; ++i)
    for (int64_t j = 0; j < 3; ++j) x.at({i, j}).fill(value * std::sin(double(7 * micro + 3 * i + j)));
  return x;
}

std::vector<std::vector<float>> weights_of(const optim::Optimizer& optimizer) {
  std::vector<std::vector<float>> all;
  for (const auto& parameter : optimizer.parameters())
    all.push_back(parameter.tensor.detach().packed().to_vector<float>());
  return all;
}

/// Three steps of eight micro-batches on a rank of `world`, with sums by the tree.
std::vector<std::vector<float>> trained(const World& world, uint64_t seed, int micro_batches = 8) {
  Net net(seed);
  optim::AdamW optimizer(nn::parameters(net), {.lr = 0.01, .max_norm = 0.1});
  const DataParallel reduce(optimizer, world, {.mean = false});
  const Share share = share_of(micro_batches, world.rank(), world.size());
  GradientTree tree(optimizer);
  for (int step = 0; step < 3; ++step) {
    optimizer.zero_grad();
    for (int k = 0; k < share.count; ++k) {
      Tape tape;
      tape.backward(
          ops::scale(net.loss(data_of(step * micro_batches + share.first + k)), 1.0 / micro_batches));
      if (share.count > 1) tree.add(k, share.count);
    }
    optimizer.step();
  }
  return weights_of(optimizer);
}

TEST(DataParallel, TheSameBitsOnAnyNumberOfRanks) {
  const auto alone = trained(World(), 1);
  for (const int ranks : {2, 4, 8})
    comm::run_threads(ranks, [&](comm::Communicator& c) {
      // Weights that differ: all take rank 0's.
      EXPECT_EQ(trained(World(c, c), c.rank() == 0 ? 1 : 99), alone) << ranks << " ranks";
    });
}

TEST(DataParallel, ATreeOfAnyNumberOfMicroBatches) {
  // On three ranks with two each, and on one with six, whose sums wait at the end.
  const auto alone = trained(World(), 1, 6);
  comm::run_threads(3, [&](comm::Communicator& c) { EXPECT_EQ(trained(World(c, c), 1, 6), alone); });
  const auto five = trained(World(), 1, 5);
  comm::run_threads(5, [&](comm::Communicator& c) { EXPECT_EQ(trained(World(c, c), 1, 5), five); });
}

TEST(DataParallel, OneLineMakesTheMeanOfTheRanks) {
  // Equal data on all ranks: the mean is what one rank has alone, exactly for a power of two.
  const auto step = [](const World& world) {
    Net net(3);
    optim::AdamW optimizer(nn::parameters(net), {.lr = 0.01});
    const DataParallel reduce(optimizer, world);
    Tape tape;
    tape.backward(net.loss(data_of(0)));
    optimizer.step();
    return std::pair(weights_of(optimizer), optimizer.grad_norm());
  };
  const auto alone = step(World());
  comm::run_threads(4, [&](comm::Communicator& c) { EXPECT_EQ(step(World(c, c)), alone); });
}

TEST(DataParallel, AGradientOnOneRankAloneReachesAll) {
  comm::run_threads(2, [](comm::Communicator& c) {
    Net net(3);
    optim::AdamW optimizer(nn::parameters(net), {.lr = 0.01});
    const DataParallel reduce(optimizer, World(c, c));
    if (c.rank() == 0) {
      Tape tape;
      tape.backward(net.loss(data_of(0)));
    }
    optimizer.step();
    EXPECT_GT(optimizer.grad_norm(), 0) << "rank " << c.rank();
    const auto own = weights_of(optimizer);
    const std::string text(reinterpret_cast<const char*>(own[0].data()), own[0].size() * sizeof(float));
    const auto all = c.gather_texts(text);
    EXPECT_EQ(all[0], all[1]);
  });
}

TEST(DataParallel, AllSkipAStepThatIsNotFiniteOnOne) {
  comm::run_threads(3, [](comm::Communicator& c) {
    Net net(3);
    optim::AdamW optimizer(nn::parameters(net), {.lr = 0.01});
    const DataParallel reduce(optimizer, World(c, c));
    const auto before = weights_of(optimizer);
    const auto pass = [&](double value) {
      optimizer.zero_grad();
      Tape tape;
      tape.backward(net.loss(data_of(c.rank(), value)));
      optimizer.step();
    };
    pass(c.rank() == 1 ? std::numeric_limits<double>::quiet_NaN() : 1);
    EXPECT_EQ(optimizer.skipped(), 1) << "rank " << c.rank();
    EXPECT_EQ(weights_of(optimizer), before);
    pass(1);
    EXPECT_EQ(optimizer.steps(), 1);
    EXPECT_NE(weights_of(optimizer), before);
  });
}

TEST(DataParallel, DifferentModelsAreRefusedOnAllRanks) {
  comm::run_threads(2, [](comm::Communicator& c) {
    Rng rng(1);
    nn::Linear layer(3, c.rank() == 0 ? 4 : 5, rng, kCpu);
    optim::AdamW optimizer(nn::parameters(layer), {});
    expect_error([&] { DataParallel(optimizer, World(c, c)); },
                 {"rank 1 has 2 parameters", "rank 0 has 2 parameters", "the same model"});
  });
}

TEST(DataParallel, SharesAreEqualAndConsecutive) {
  EXPECT_EQ(share_of(8, 2, 4).first, 4);
  EXPECT_EQ(share_of(8, 2, 4).count, 2);
  expect_error([] { share_of(6, 0, 4); }, {"6 micro-batches on 4 ranks", "multiple"});
  expect_error([] { share_of(2, 0, 4); }, {"2 micro-batches on 4 ranks"});
}

}  // namespace
}  // namespace tessera::dist
