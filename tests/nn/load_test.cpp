#include "nn/load.h"

#include <gtest/gtest.h>

#include "nn/norm.h"
#include "nn/sequential.h"
#include "tests/errors.h"
#include "tests/tensors.h"

namespace tessera::nn {
namespace {

using WeightMap = std::map<std::string, Tensor>;

/// A layer, a norm without gradient, a tensor that is no parameter, and indices.
struct Mixed {
  explicit Mixed(Rng& rng) : linear(3, 2, rng), norm(2) {
    freeze(norm, [](const std::string&) { return true; });
  }
  void fields(auto&& visit) {
    visit("linear", linear), visit("norm", norm), visit("mean", mean), visit("order", order);
    visit("absent", absent);
  }
  Linear linear;
  LayerNorm norm;
  Tensor mean = Tensor::zeros({2}), order = Tensor::zeros({2}, DType::i64), absent;
};

WeightMap weights_of_model() {
  return {{"linear.weight", Tensor::from({1.f, 2.f, 3.f, 4.f, 5.f, 6.f}, {2, 3})},
          {"linear.bias", Tensor::from({7.f, 8.f}, {2})},
          {"norm.weight", Tensor::from({9.f, 10.f}, {2})},
          {"norm.bias", Tensor::from({11.f, 12.f}, {2})},
          {"mean", Tensor::from({13.f, 14.f}, {2})},
          {"order", Tensor::from({int64_t{1}, int64_t{0}}, {2})}};
}

std::vector<std::vector<double>> values_of(Mixed& model) {
  std::vector<std::vector<double>> all;
  for_each<Tensor>(model, [&](const std::string&, Tensor& tensor) {
    if (tensor.defined()) all.push_back(values(tensor.detach()));
  });
  return all;
}

/// The error of loading, after which the model has the values that it had.
std::string refused(Mixed& model, const WeightMap& weights, const LoadOptions& options = {}) {
  const auto before = values_of(model);
  const std::string error = message_of([&] { load(model, weights, options); });
  EXPECT_EQ(values_of(model), before);
  return error;
}

TEST(LayerLoad, CopiesIntoTensorsOfTheSameNames) {
  Rng rng(1);
  Mixed model(rng);
  const Tensor weight = model.linear.weight;
  const uint64_t version = weight.version();
  const LoadReport report = load(model, weights_of_model());
  EXPECT_TRUE(report.missing.empty() && report.unexpected.empty());
  EXPECT_EQ(values_of(model), (std::vector<std::vector<double>>{
                                  {1, 2, 3, 4, 5, 6}, {7, 8}, {9, 10}, {11, 12}, {13, 14}, {1, 0}}));
  EXPECT_EQ(model.linear.weight.grad_state(), weight.grad_state());
  EXPECT_TRUE(model.linear.weight.same_elements(weight));
  EXPECT_GT(weight.version(), version);
}

TEST(LayerLoad, TakesTheParametersOfAnotherModel) {
  Rng rng(1);
  const Linear online(3, 2, rng);
  Linear target(3, 2, rng);
  load(target, parameters(online));
  EXPECT_TRUE(same_bits(target.weight, online.weight));
  EXPECT_TRUE(same_bits(target.bias, online.bias));
  EXPECT_FALSE(target.weight.shares_storage(online.weight));
}

TEST(LayerLoad, RoundsFloatingWeightsOnceToTheDtypeOfTheModel) {
  Rng rng(1);
  Linear model(3, 2, rng, {.dtype = DType::bf16});
  const Tensor exact = Tensor::from({1.0, 1 + 0x1p-8 + 0x1p-30, 3.0, 4.0, 5.0, 6.0}, {2, 3});
  load(model, WeightMap{{"weight", exact}, {"bias", Tensor::zeros({2}, DType::f16)}});
  EXPECT_EQ(values(model.weight.detach())[1], 1 + 0x1p-7);  // by way of f32 it would be a tie, and 1
  Linear narrow(1, 1, rng, {.bias = false, .dtype = DType::f16});
  const std::vector<double> before = values(narrow.weight.detach());
  expect_parts(message_of([&] {
                 load(narrow, WeightMap{{"weight", Tensor::full({1, 1}, 1e6)}});
               }),
               {"'weight' has 1 finite values that f16 would make infinite, such as 1e+06"});
  EXPECT_EQ(values(narrow.weight.detach()), before);
}

TEST(LayerLoad, ListsAllThatDoesNotFitAndChangesNothing) {
  Rng rng(1);
  Mixed model(rng);
  WeightMap weights = weights_of_model();
  weights["linear.weight"] = Tensor::zeros({3});  // would broadcast
  weights["linear.bias"] = Tensor::zeros({2}, DType::i64);
  weights["order"] = Tensor::zeros({2}, DType::i32);
  weights["absent"] = Tensor::zeros({2});
  weights.erase("mean");
  weights["other\n"] = Tensor::zeros({2});
  EXPECT_EQ(refused(model, weights),
            "nn::load: the weights do not fit the model, which is unchanged:"
            "\n  mis-shaped  linear.weight: f32[3], expected f32[2, 3]"
            "\n  mis-typed   linear.bias: i64[2], expected f32[2]"
            "\n  mis-typed   order: i32[2], expected i64[2]"
            "\n  missing     mean: f32[2]"
            "\n  unexpected  absent"
            "\n  unexpected  other?");
  expect_parts(refused(model, weights, {.strict = false}),
               {"mis-shaped  linear.weight", "mis-typed   linear.bias", "mis-typed   order"});
  weights = weights_of_model();
  weights["mean"] = Tensor();
  expect_parts(refused(model, weights), {"undefined   mean"});
}

TEST(LayerLoad, NotStrictItReportsWhatIsLeftAlone) {
  Rng rng(1);
  Mixed model(rng);
  WeightMap weights = weights_of_model();
  weights.erase("mean");
  weights["other"] = Tensor::zeros({2});
  const LoadReport report = load(model, weights, {.strict = false});
  EXPECT_EQ(report.missing, std::vector<std::string>{"mean"});
  EXPECT_EQ(report.unexpected, std::vector<std::string>{"other"});
  EXPECT_EQ(values(model.mean), (std::vector<double>{0, 0}));
  EXPECT_EQ(values(model.linear.bias.detach()), (std::vector<double>{7, 8}));
}

TEST(LayerLoad, RenamesAndLeavesOut) {
  Rng rng(1);
  Mixed model(rng);
  WeightMap weights;
  for (const auto& [name, tensor] : weights_of_model()) weights["module." + name] = tensor;
  weights["optimizer.step"] = Tensor::zeros({});
  const auto rename = [](const std::string& name) {
    return name.starts_with("module.") ? name.substr(7) : std::string();
  };
  load(model, weights, {.rename = rename});
  EXPECT_EQ(values(model.mean), (std::vector<double>{13, 14}));
  weights["module.mean"] = Tensor::zeros({3});
  weights["module.more"] = Tensor::zeros({3});
  expect_parts(refused(model, weights, {.rename = rename}),
               {"mis-shaped  mean, here 'module.mean': f32[3], expected f32[2]",
                "unexpected  module.more, here 'more'"});
  const auto both = [](const std::string& name) {
    return name == "linear.bias" ? std::string("mean") : name;
  };
  expect_parts(refused(model, weights_of_model(), {.rename = both}),
               {"twice       mean: as 'linear.bias' and 'mean'", "missing     linear.bias: f32[2]"});
}

TEST(LayerLoad, TiedTensorsTakeOneValueUnderAnyOfTheirNames) {
  Rng rng(1);
  Sequential model{Linear(2, 2, rng, {.bias = false}), Linear(2, 2, rng, {.bias = false})};
  auto& [first, second] = model.layers;
  second.weight = first.weight;
  const Tensor ones = Tensor::ones({2, 2}), twos = Tensor::full({2, 2}, 2);
  load(model, WeightMap{{"1.weight", ones}});
  EXPECT_EQ(values(first.weight.detach()), std::vector<double>(4, 1));
  load(model, WeightMap{{"0.weight", twos}, {"1.weight", twos.clone()}});
  EXPECT_EQ(values(first.weight.detach()), std::vector<double>(4, 2));
  expect_parts(message_of([&] {
                 load(model, WeightMap{{"0.weight", ones}, {"1.weight", twos}});
               }),
               {"different   1.weight: is tied to 0.weight, but has other values than '0.weight'"});
  expect_parts(message_of([&] { load(model, WeightMap{}); }), {"missing     0.weight: f32[2, 2]"});
  EXPECT_EQ(values(first.weight.detach()), std::vector<double>(4, 2));
}

TEST(LayerLoad, RefusesTensorsThatCannotBeWritten) {
  Rng rng(1);
  Mixed model(rng);
  model.mean = Tensor::zeros({1}).expand({2});
  Tensor leaf = Tensor::zeros({2}), result = leaf.clone();
  require_grad(leaf);
  Tape tape;
  tape.record("mine", {&leaf}, {&result}, [](Backward&) {});
  model.norm.weight = result;
  const std::string error = message_of([&] { load(model, weights_of_model()); });
  expect_parts(error, {"read-only   mean: expanded; clone() it",
                       "read-only   norm.weight: a result of a tape; detach() it"});
  EXPECT_EQ(values(model.norm.bias), (std::vector<double>{0, 0}));
}

TEST(LayerLoad, ListsSomeOfEachKind) {
  Misfits misfits;
  for (int i = 0; i < 12; ++i) misfits.add("missing", "a" + std::to_string(i));
  misfits.add("unexpected", "b");
  expect_parts(misfits.lines(), {"\n  missing     a0\n  missing     a1\n", "\n  missing     and 2 more\n",
                                 "\n  unexpected  b"});
  EXPECT_EQ(misfits.lines().find("a9"), std::string::npos);
}

}  // namespace
}  // namespace tessera::nn
