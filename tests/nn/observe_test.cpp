#include "nn/observe.h"

#include <gtest/gtest.h>

#include "autograd/checkpoint.h"
#include "nn/mlp.h"
#include "ops/matmul/matmul.h"
#include "ops/pointwise/pointwise.h"
#include "ops/reduce/reduce.h"
#include "ops/swiglu/swiglu.h"
#include "tests/errors.h"
#include "tests/nn/no_recorder.h"
#include "tests/nn/random.h"

namespace tessera::nn {
namespace {

/// Two feed-forward networks, the second gated.
struct ObservedModel {
  explicit ObservedModel(Rng& rng)
      : first(3, 7, rng, kCpu, {.activation = ops::Activation::gelu, .dtype = DType::f64}),
        second(3, 5, rng, kCpu, {.out = 2, .gated = true, .bias = false, .dtype = DType::f64}) {}
  Tensor operator()(const Tensor& x) const { return second(first(x, x)); }
  void fields(auto&& visit) { visit("first", first), visit("second", second); }

  Mlp first, second;
};
const std::vector<std::string> kForward{"first.up", "first.down", "second.up", "second.down"};
const std::vector<std::string> kBackward{"second.down", "second.up", "first.down", "first.up"};

/// All that an observer saw.
struct Log {
  std::vector<std::string> forward, backward;
  std::map<std::string, Tensor> inputs, outputs, gradients;

  Observer observer() {
    return {.forward =
                [this](const LinearCall& call) {
                  forward.push_back(call.name);
                  inputs[call.name] = call.input.clone();
                  outputs[call.name] = call.output.clone();
                },
            .backward =
                [this](const LinearCall& call, const Tensor& dy) {
                  backward.push_back(call.name);
                  EXPECT_EQ(values(call.input), values(inputs[call.name])) << call.name;
                  EXPECT_EQ(values(call.output), values(outputs[call.name])) << call.name;
                  gradients[call.name] = dy.clone();
                }};
  }
};

Tensor loss_of(const ObservedModel& model, const Tensor& x) {
  const Tensor y = model(x);
  return ops::mean(ops::mul(y, y));
}

TEST(Observe, SeesInputsAndOutputsOfEveryLinearLayer) {
  Rng rng(1);
  const ObservedModel model(rng);
  const Tensor x = random({4, 3}, 2);
  const Tensor plain = model(x);
  Log log;
  {
    const Observe scope(model, log.observer());
    EXPECT_LT(largest_difference(model(x), plain), 1e-14);
  }
  EXPECT_EQ(log.forward, kForward);
  EXPECT_TRUE(log.backward.empty());  // no tape
  EXPECT_EQ(values(log.inputs["first.up"]), values(x));
  EXPECT_EQ(values(log.inputs["first.down"]), values(ops::gelu(model.first.up(x))));
  const Tensor middle = model.first(x, x);
  EXPECT_LT(largest_difference(log.inputs["second.up"], middle), 1e-14);
  EXPECT_LT(largest_difference(log.inputs["second.down"], ops::swiglu(model.second.up(middle))), 1e-14);
  EXPECT_LT(largest_difference(log.outputs["second.down"], plain), 1e-14);
  model(x);
  EXPECT_EQ(log.forward, kForward);  // the scope has ended
}

TEST(Observe, SeesTheGradientsThatMakeTheWeightGradients) {
  Rng rng(1);
  ObservedModel model(rng);
  const Tensor x = random({4, 3}, 2);
  std::map<std::string, Tensor> plain;
  {
    Tape tape;
    tape.backward(loss_of(model, x));
    for (const NamedParameter& one : parameters(model)) plain[one.name] = grad(one.tensor).clone();
  }
  zero_grad(model);
  Log log;
  const Observe scope(model, log.observer());
  Tape tape;
  tape.backward(loss_of(model, x));
  EXPECT_EQ(log.forward, kForward);
  EXPECT_EQ(log.backward, kBackward);
  for (const NamedParameter& one : parameters(model))
    EXPECT_LT(largest_difference(grad(one.tensor), plain[one.name]), 1e-14) << one.name;
  for_each_linear(model, [&](const std::string& name, const Linear& layer) {
    const Tensor dweight = ops::matmul(log.gradients[name], log.inputs[name], true);
    EXPECT_LT(largest_difference(grad(layer.weight), dweight), 1e-14) << name;
  });
}

TEST(Observe, ACheckpointedPartIsSeenOnce) {
  Rng rng(1);
  ObservedModel model(rng);
  const Tensor x = random({4, 3}, 2);
  const auto loss = [&] {
    const Tensor y = checkpoint([&](const Tensor& input) { return model(input); }, x);
    return ops::mean(ops::mul(y, y));
  };
  Log plain, log;
  for (const bool checkpointed : {false, true}) {
    const Observe scope(model, (checkpointed ? log : plain).observer());
    zero_grad(model);
    Tape tape;
    tape.backward(checkpointed ? loss() : loss_of(model, x));
    EXPECT_FALSE(recomputing());
  }
  EXPECT_EQ(log.forward, kForward);
  EXPECT_EQ(log.backward, kBackward);
  for (const std::string& name : kForward) {
    EXPECT_EQ(values(log.inputs[name]), values(plain.inputs[name]));
    EXPECT_EQ(values(log.gradients[name]), values(plain.gradients[name]));
  }
}

TEST(Observe, ScopesNestAndSeeTheirOwnPartAlone) {
  Rng rng(1);
  const ObservedModel model(rng);
  const Tensor x = random({4, 3}, 2);
  Log outer, inner;
  {
    const Observe whole(model, outer.observer());
    const Observe part(model.second, inner.observer(), "block");
    Tape tape;
    tape.backward(loss_of(model, x));
  }
  EXPECT_EQ(outer.forward, kForward);
  EXPECT_EQ(outer.backward, kBackward);
  EXPECT_EQ(inner.forward, (std::vector<std::string>{"block.up", "block.down"}));
  EXPECT_EQ(inner.backward, (std::vector<std::string>{"block.down", "block.up"}));
  EXPECT_EQ(values(inner.gradients["block.up"]), values(outer.gradients["second.up"]));
}

TEST(Observe, WhatAnObserverCallsIsNeitherSeenNorRecorded) {
  Rng rng(1);
  const ObservedModel model(rng);
  int calls = 0;
  const Observe scope(model, {.forward =
                                  [&](const LinearCall& call) {
                                    ++calls;
                                    EXPECT_FALSE(requires_grad(call.input));
                                    EXPECT_FALSE(requires_grad(model.second(random({1, 3}, 5))));
                                  },
                              .backward =
                                  [&](const LinearCall&, const Tensor&) {
                                    model(random({1, 3}, 5));
                                  }});
  Tape tape;
  tape.backward(loss_of(model, random({4, 3}, 2)));
  EXPECT_EQ(calls, 4);
}

TEST(Observe, GradientsAfterItsEndAreNotSeen) {
  Rng rng(1);
  const ObservedModel model(rng);
  Log log;
  Tape tape;
  Tensor loss;
  {
    const Observe scope(model, log.observer());
    loss = loss_of(model, random({4, 3}, 2));
  }
  tape.backward(loss);
  EXPECT_EQ(log.forward, kForward);
  EXPECT_TRUE(log.backward.empty());
  EXPECT_TRUE(grad(model.first.up.weight).defined());
}

TEST(Observe, AnErrorOfAnObserverEndsThePassWithoutATrace) {
  Rng rng(1);
  const ObservedModel model(rng);
  {
    const Observe scope(model, {.backward = [](const LinearCall& call, const Tensor&) {
                          check(call.name != "first.down", "the observer of ", call.name, " gave up");
                        }});
    Tape tape;
    const Tensor loss = loss_of(model, random({4, 3}, 2));
    EXPECT_EQ(message_of([&] { tape.backward(loss); }), "the observer of first.down gave up");
  }
  EXPECT_FALSE(grad(model.second.up.weight).defined());
  EXPECT_FALSE(Observe::sees(&model.first.up));
}

TEST(Observe, SaysWhatCannotBeObserved) {
  Rng rng(1);
  const ObservedModel model(rng);
  const std::vector<Mlp> none;
  EXPECT_EQ(message_of([&] { Observe(none, {}); }), "nn::Observe: there is no linear layer to observe");
  const CaptureSession session(kCpu);
  EXPECT_NE(message_of([&] { Observe(model, {}); }).find("begin the scope outside the captured body"),
            std::string::npos);
}

TEST(Observe, ACapturedStepRunsEagerlyWhileItIsObserved) {
  Rng rng(1);
  const ObservedModel model(rng);
  const Tensor x = random({4, 3}, 2);
  Captured step(
      kCpu, [&] { model(x); }, std::make_unique<NoRecorder>());
  for (int i = 0; i < 3; ++i) step();
  EXPECT_TRUE(step.is_graph());
  Log log;
  {
    const Observe scope(model, log.observer());
    for (int i = 0; i < 2; ++i) step();
    EXPECT_FALSE(step.is_graph());
  }
  EXPECT_EQ(log.forward.size(), 2 * kForward.size());
  step();
  EXPECT_TRUE(step.is_graph());
  EXPECT_EQ(log.forward.size(), 2 * kForward.size());
}

TEST(Observe, SumsTheSquaresOfAllInputs) {  // the snippet of the header
  Rng rng(1);
  const ObservedModel model(rng);
  std::map<std::string, Tensor> sums;
  const Observe scope(model, {.forward = [&](const LinearCall& call) {
                        const Tensor x = call.input.reshape_with({-1, call.input.size(-1)});
                        const Tensor sum = ops::matmul(x, x, true);
                        Tensor& all = sums[call.name];
                        all = all.defined() ? ops::add(all, sum) : sum;
                      }});
  const Tensor x = random({2, 2, 3}, 2);
  model(x), model(x);
  EXPECT_EQ(sums.size(), 4u);
  const Tensor rows = x.reshape({4, 3});
  EXPECT_LT(largest_difference(sums["first.up"], ops::scale(ops::matmul(rows, rows, true), 2)), 1e-13);
}

}  // namespace
}  // namespace tessera::nn
