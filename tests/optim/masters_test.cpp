/// Weights that something else than a step writes, next to the f32 masters from which steps compute them.

#include <gtest/gtest.h>

#include "autograd/tape.h"
#include "ops/pointwise/pointwise.h"
#include "ops/reduce/reduce.h"
#include "optim/adamw.h"
#include "tests/errors.h"

namespace tessera::optim {
namespace {

struct Model {
  Tensor weight, other;
  explicit Model(DType dtype, double value = 1)
      : weight(Tensor::full({2, 3}, value, dtype, Device::cpu())),
        other(Tensor::full({4}, value, dtype, Device::cpu())) {
    nn::make_parameter(weight), nn::make_parameter(other);
  }
  void backward() const {
    Tape tape;
    tape.backward(ops::add(ops::sum(ops::mul(weight, weight)), ops::sum(ops::mul(other, other))));
  }
  std::vector<double> values() const {
    std::vector<double> all = weight.detach().to(DType::f64).to_vector<double>();
    for (const double value : other.detach().to(DType::f64).to_vector<double>()) all.push_back(value);
    return all;
  }
  void fields(auto&& visit) { visit("weight", weight), visit("other", other); }
};

void train(const Model& model, AdamW& optimizer, int steps) {
  for (int i = 0; i < steps; ++i) model.backward(), optimizer.step(), optimizer.zero_grad();
}

/// What loading a checkpoint does.
template <class T>
void copy_fields(const T& from, T& to) {
  std::vector<Tensor> source;
  nn::for_each<Tensor>(from,
                       [&](const std::string&, const Tensor& leaf) { source.push_back(leaf.detach()); });
  size_t next = 0;
  nn::for_each<Tensor>(to,
                       [&](const std::string&, Tensor& leaf) { leaf.detach().copy_from(source[next++]); });
}

class Masters : public testing::TestWithParam<DType> {};

TEST_P(Masters, OfWeightsThatWereLoadedLaterAreAskedFor) {
  Model model(GetParam());
  AdamW optimizer(nn::parameters(model), {.lr = 1e-2});
  for (const int before : {0, 2}) {
    train(model, optimizer, before);
    copy_fields(Model(GetParam(), 3), model);
    const std::vector<double> loaded = model.values();
    model.backward();
    expect_error([&] { optimizer.step(); },
                 {"AdamW: weight ", "was written since the last step", "call sync_masters()"});
    EXPECT_EQ(model.values(), loaded);
    optimizer.sync_masters();
    optimizer.step(), optimizer.zero_grad();
    for (const double value : model.values()) EXPECT_NEAR(value, 3, 0.1);
  }
  model.other.detach().fill(2);
  expect_error([&] { optimizer.step(); }, {"AdamW: other "});
}

TEST_P(Masters, StayWhereTheWeightsAreWhatTheyWere) {
  Model model(GetParam()), same(GetParam());
  AdamW optimizer(nn::parameters(model), {.lr = 1e-4}), untouched(nn::parameters(same), {.lr = 1e-4});
  train(model, optimizer, 3), train(same, untouched, 3);
  const Tensor kept = model.weight.detach().clone();
  model.weight.detach().fill(7);  // other weights for an evaluation
  model.weight.detach().copy_from(kept);
  train(model, optimizer, 40), train(same, untouched, 40);
  EXPECT_EQ(model.values(), same.values());
}

TEST_P(Masters, ThatAreLoadedWithTheirWeightsAreThese) {
  Model model(GetParam()), resumed(GetParam(), 2);
  AdamW optimizer(nn::parameters(model), {.lr = 1e-3}), other(nn::parameters(resumed), {.lr = 1});
  train(model, optimizer, 3);
  copy_fields(model, resumed), copy_fields(optimizer, other), other.set_lr(1e-3);
  train(model, optimizer, 30), train(resumed, other, 30);
  EXPECT_EQ(model.values(), resumed.values());
}

INSTANTIATE_TEST_SUITE_P(Of, Masters, testing::Values(DType::bf16, DType::f16),
                         [](const auto& info) { return std::string(name_of(info.param)); });

TEST(MasterWeights, WithoutMastersMayBeWritten) {
  Model model(DType::f32), narrow(DType::bf16);
  AdamW optimizer(nn::parameters(model), {.lr = 1e-2}),
      short_states(nn::parameters(narrow), {.lr = 1e-2, .states = DType::bf16});
  model.weight.detach().fill(3), narrow.weight.detach().fill(3);
  train(model, optimizer, 1), train(narrow, short_states, 1);
  EXPECT_NEAR(model.values()[0], 3, 0.1);
  EXPECT_NEAR(narrow.values()[0], 3, 0.1);
}

}  // namespace
}  // namespace tessera::optim
