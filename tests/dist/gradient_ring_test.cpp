#include "optim/gradient_ring.h"

#include <gtest/gtest.h>

#include <cmath>

#include "autograd/tape.h"
#include "comm/threads.h"
#include "dist/data_parallel.h"
#include "nn/linear.h"
#include "ops/pointwise/pointwise.h"
#include "ops/reduce/reduce.h"
#include "optim/adamw.h"
#include "tests/errors.h"
#include "tests/tensors.h"

// Gradients that are spread over ranks: what lies where while a backward pass runs.

namespace tessera::dist {
namespace {

/// Eight layers, each a bucket of its own, that may share the first one's weight at the end, and one that
/// nothing uses.
struct Deep {
  explicit Deep(bool tied) : rng(7), unused(3, 3, rng, kCpu), tied(tied) {
    for (int i = 0; i < 8; ++i) layers.emplace_back(6, 6, rng, kCpu);
  }
  void fields(auto&& visit) { visit("layers", layers), visit("unused", unused); }
  Tensor loss(int micro, const std::vector<int>& order = {0, 1, 2, 3, 4, 5, 6, 7}) const {
    const Tensor x = Tensor::zeros({4, 6}, DType::f32, kCpu);
    for (int64_t i = 0; i < 4; ++i)
      for (int64_t j = 0; j < 6; ++j) x.at({i, j}).fill(std::sin(double(7 * micro + 3 * i + j)));
    Tensor y = x;
    for (const int i : order) y = layers[size_t(i)](y);
    if (tied) y = layers[0](y);
    return ops::mean(ops::mul(y, y));
  }
  Rng rng;
  std::vector<nn::Linear> layers;
  nn::Linear unused;
  bool tied;
};

std::vector<float> flat_weights_of(const optim::Optimizer& optimizer) {
  std::vector<float> all;
  for (const auto& parameter : optimizer.parameters()) {
    const std::vector<float> one = parameter.tensor.detach().packed().to_vector<float>();
    all.insert(all.end(), one.begin(), one.end());
  }
  return all;
}

struct End {
  std::vector<float> weights;
  std::vector<std::string> kept;
};

End trained_deep(const World& world, bool tied, bool gradients, const std::vector<int>& order) {
  Deep net(tied);
  optim::AdamW optimizer(
      nn::parameters(net),
      {.lr = 0.01,
       .max_grad_norm = 0.1,
       .sharding = world.size() > 1 ? optim::Sharding{world.rank(), world.size(), 1e-6, gradients}
                                    : optim::Sharding()});
  DataParallel reduce(optimizer, world, {.mean = false});
  for (int step = 0; step < 3; ++step) {
    optimizer.zero_grad();
    reduce.overlap();
    Tape tape;
    Tensor loss = net.loss(2 * step + world.rank(), order);
    if (world.size() == 1) loss = ops::add(loss, net.loss(2 * step + 1, order));
    tape.backward(loss);
    optimizer.step();
  }
  return {flat_weights_of(optimizer), reduce.kept()};
}

TEST(GradientRing, HoldsAFewBucketsWhateverTheModel) {
  comm::run_threads(2, [](comm::Communicator& c) {
    Deep net(false);
    optim::AdamW optimizer(nn::parameters(net), {.sharding = {c.rank(), 2, 1e-6, true}});
    const size_t pad = 64 * sizeof(float);
    // Of 18 parameters of 64 elements at most each: three slots, and half of the whole.
    EXPECT_EQ(optimizer.ring()->bytes(), 3 * pad + optimizer.gradients().bytes());
    EXPECT_EQ(c.rank() + 0, c.rank());
    const int64_t both = c.largest(optimizer.gradients().count());
    EXPECT_LE(both, 18 * 64);
  });
}

TEST(GradientRing, HasTheBitsOfSpreadStates) {
  const std::vector<int> along{0, 1, 2, 3, 4, 5, 6, 7}, against{7, 2, 5, 0, 3, 6, 1, 4};
  for (const bool tied : {false, true})
    for (const auto& order : {along, against})
      comm::run_threads(2, [&](comm::Communicator& c) {
        const World world(c, c);
        const End states = trained_deep(world, tied, false, order),
                  all = trained_deep(world, tied, true, order);
        EXPECT_EQ(states.weights, all.weights) << tied;
        EXPECT_TRUE(states.kept.empty());
        // In the arena's order the first layer alone, whose gradient begins early where it is tied, is kept:
        // the parameters that nothing uses hold up none.
        if (order == along && !tied) {
          EXPECT_TRUE(all.kept.empty()) << all.kept[0];
        } else if (order == along) {
          EXPECT_EQ(all.kept, (std::vector<std::string>{"layers.0.bias", "layers.0.weight"}));
        } else {
          EXPECT_FALSE(all.kept.empty());
        }
      });
}

TEST(GradientRing, WhatCannotBeIsRefused) {
  comm::run_threads(2, [](comm::Communicator& c) {
    Deep net(false);
    optim::AdamW optimizer(nn::parameters(net), {.sharding = {c.rank(), 2, 1e-6, true}});
    DataParallel reduce(optimizer, World(c, c));
    const auto pass = [&] {
      Tape tape;
      tape.backward(net.loss(c.rank()));
    };
    expect_error([&] { pass(); }, {"layers.7", "overlap() before", "--zero 1"});
    reduce.overlap();
    expect_error([&] { reduce.overlap(); }, {"overlap() again before collect()"});
    pass();
    expect_error([&] { pass(); }, {"the gradient of layers.7", "came again after it had been sent"});
    expect_error([&] { reduce.collect(); }, {"the gradients of this step are lost", "zero_grad()"});
    optimizer.zero_grad();
    reduce.overlap();
    pass();
    reduce.collect();
    expect_error([&] { reduce.overlap([](int64_t, int64_t) {}); }, {"completed after collect()"});
    expect_error([&] { reduce.overlap(); }, {"nothing has taken its sums", "GradientTree", "zero_grad()"});
    EXPECT_FALSE(grad(net.layers[0].weight).defined());  // its memory is another's
    optimizer.step();
    EXPECT_EQ(optimizer.steps(), 1);
    EXPECT_GT(optimizer.grad_norm(), 0);
    reduce.overlap();  // the step has used the sums
    pass();
    reduce.collect();
    optimizer.zero_grad();
    reduce.overlap();  // and these are not wanted
    pass();
    optimizer.step();
    EXPECT_EQ(optimizer.steps(), 2);
  });
}

TEST(GradientRing, APassThatThrowsOnAllRanksLeavesTheNextStepRight) {
  comm::run_threads(2, [](comm::Communicator& c) {
    const auto weights = [&](bool fails) {
      Deep net(true);
      optim::AdamW optimizer(nn::parameters(net), {.lr = 0.01, .sharding = {c.rank(), 2, 1e-6, true}});
      DataParallel reduce(optimizer, World(c, c));
      for (int step = 0; step < 2; ++step) {
        optimizer.zero_grad();
        if (fails) {
          reduce.overlap();
          Tape tape;
          Tensor x = Tensor::full({4, 6}, 1, DType::f32, kCpu), y = x.clone();
          require_grad(x);
          tape.record("planted", {&x}, {&y}, [](Backward&) { check(false, "planted in backward"); });
          for (const nn::Linear& layer : net.layers) y = layer(y);
          expect_error([&] { tape.backward(ops::mean(y)); }, {"planted in backward"});
        }
        reduce.overlap();
        Tape tape;
        tape.backward(net.loss(2 * step + c.rank()));
        optimizer.step();
      }
      return flat_weights_of(optimizer);
    };
    EXPECT_EQ(weights(true), weights(false));
  });
}

}  // namespace
}  // namespace tessera::dist
