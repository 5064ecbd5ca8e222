#include "nn/any_layer.h"

#include <gtest/gtest.h>

#include "autograd/tape.h"
#include "nn/activation.h"
#include "nn/drop_bp.h"
#include "nn/load.h"
#include "nn/norm.h"
#include "nn/sequential.h"
#include "nn/summary.h"
#include "ops/pointwise/pointwise.h"
#include "ops/reduce/reduce.h"
#include "tests/errors.h"
#include "tests/tensors.h"

namespace tessera::nn {
namespace {

struct GainConfig {
  DType dtype = DType::f32;
};

/// A layer that the library does not know, with all kinds of parts.
struct Gain {
  static constexpr const char* kKind = "Gain";
  Gain(int64_t width, Rng& rng) : inner(width, width, rng), rng(rng) {
    gain = Tensor::ones({width}, DType::f32, kCpu);
    make_parameter(gain);
  }
  Tensor operator()(const Tensor& x, Site site = Site::here()) const {
    const LayerCall call(*this, site);
    return ops::mul(inner(x), gain);
  }
  double flops(int64_t tokens) const { return double(tokens * gain.count()); }
  void fields(auto&& visit) {
    visit("gain", gain), visit("inner", inner), visit("calls", calls), visit("rng", rng),
        visit("curve", curve);
  }
  LayerName layer_name;

  Tensor gain;
  Linear inner;
  int64_t calls = 3;
  Rng rng;
  std::vector<double> curve{1, 2};
  GainConfig config;
};

struct ListNet {
  explicit ListNet(Rng& rng, int64_t in = 3) {
    layers.push_back(Linear(in, 4, rng));
    layers.push_back(Gelu{});
    layers.push_back(Gain(4, rng));
    layers.push_back(Sequential(LayerNorm(4), Dropout(0.5, rng)));
    layers.push_back(Mlp(4, 8, rng));
  }
  Tensor operator()(Tensor x) const {
    for (const AnyLayer& layer : layers) x = layer(x);
    return x;
  }
  void fields(auto&& visit) { visit("layers", layers); }
  std::vector<AnyLayer> layers;
};

std::vector<std::string> parameter_names(const ListNet& net) {
  std::vector<std::string> names;
  for (const NamedParameter& parameter : parameters(net)) names.push_back(parameter.name);
  return names;
}

TEST(AnyLayer, PartsHaveTheNamesThatTheyHaveWithoutIt) {
  Rng rng(1);
  EXPECT_EQ(parameter_names(ListNet(rng)),
            (std::vector<std::string>{"layers.0.weight", "layers.0.bias", "layers.2.gain",
                                      "layers.2.inner.weight", "layers.2.inner.bias", "layers.3.0.weight",
                                      "layers.3.0.bias", "layers.4.up.weight", "layers.4.up.bias",
                                      "layers.4.down.weight", "layers.4.down.bias"}));
}

TEST(AnyLayer, ComputesAndTrainsAsTheLayersThemselves) {
  Rng rng(2), same(2);
  const Sequential plain{Linear(3, 4, same), Gelu{}, Linear(4, 2, same)};  // braces: drawn in this order
  std::vector<AnyLayer> layers;
  layers.push_back(Linear(3, 4, rng));
  layers.push_back(Gelu{});
  layers.push_back(Linear(4, 2, rng));
  const Tensor x = Tensor::full({5, 3}, 0.5, DType::f32, kCpu);
  Tape tape;
  Tensor y = x;
  for (const AnyLayer& layer : layers) y = layer(y);
  tape.backward(ops::add(ops::sum(y), ops::sum(plain(x))));
  const auto erased = parameters(layers), typed = parameters(plain);
  ASSERT_EQ(erased.size(), typed.size());
  for (size_t i = 0; i < typed.size(); ++i) {
    EXPECT_EQ(erased[i].name, typed[i].name);
    EXPECT_EQ(grad(erased[i].tensor).to_vector<float>(), grad(typed[i].tensor).to_vector<float>());
  }
}

TEST(AnyLayer, LeavesOfEveryKindAreVisitedWithTheirTypes) {
  Rng rng(1);
  ListNet net(rng);
  std::vector<std::string> found;
  for_each_field(net, [&](const std::string& name, auto& leaf) {
    using T = std::remove_cvref_t<decltype(leaf)>;
    if constexpr (std::is_same_v<T, int64_t>) leaf = 9;
    if constexpr (!std::is_same_v<T, Tensor>)
      if (name.starts_with("layers.2")) found.push_back(name);
  });
  EXPECT_EQ(found, (std::vector<std::string>{"layers.2.calls", "layers.2.rng", "layers.2.curve"}));
  ASSERT_NE(net.layers[2].as<Gain>(), nullptr);
  EXPECT_EQ(net.layers[2].as<Gain>()->calls, 9);
  EXPECT_EQ(net.layers[0].as<Gain>(), nullptr);
  EXPECT_EQ(std::as_const(net).layers[0].as<Linear>()->in, 3);
}

TEST(AnyLayer, WeightsLoadIntoItAndOutOfIt) {
  Rng rng(1);
  ListNet a(rng), b(rng);
  load(b, parameters(a));
  for (size_t i = 0; i < parameters(a).size(); ++i)
    EXPECT_TRUE(parameters(a)[i].tensor.to_vector<float>() == parameters(b)[i].tensor.to_vector<float>());
  ListNet narrow(rng, 2);
  expect_error([&] { load(narrow, parameters(a)); }, {"mis-shaped", "layers.0.weight", "f32[4, 3]"});
}

TEST(AnyLayer, ACopySharesTheWeightsAndACloneHasItsOwn) {
  Rng rng(1);
  const ListNet net(rng);
  const ListNet copy = net, own = clone(net);
  const auto of_net = parameters(net), of_copy = parameters(copy), of_own = parameters(own);
  ASSERT_EQ(of_own.size(), of_net.size());
  for (size_t i = 0; i < of_net.size(); ++i) {
    EXPECT_TRUE(of_copy[i].tensor.shares_storage(of_net[i].tensor));
    EXPECT_FALSE(of_own[i].tensor.shares_storage(of_net[i].tensor)) << of_own[i].name;
    EXPECT_EQ(of_own[i].tensor.to_vector<float>(), of_net[i].tensor.to_vector<float>());
  }
}

TEST(AnyLayer, FunctionsFindTheLayersOfTheLibraryInIt) {
  Rng rng(1);
  ListNet net(rng);
  set_training(net, false);
  std::vector<std::string> dropouts, linears;
  for_each<Dropout>(net, [&](const std::string& name, Dropout& layer) {
    dropouts.push_back(name);
    EXPECT_FALSE(layer.training);
  });
  EXPECT_EQ(dropouts, std::vector<std::string>{"layers.3.1"});
  for_each_linear(net, [&](const std::string& name, auto&) { linears.push_back(name); });
  EXPECT_EQ(linears,
            (std::vector<std::string>{"layers.0", "layers.2.inner", "layers.4.up", "layers.4.down"}));
  EXPECT_EQ(DropBP(net, 1).branches().at(0).name, "layers.4");
  freeze(net, [](const std::string& name) { return name != "layers.0.bias"; });
  EXPECT_EQ(parameter_names(net), std::vector<std::string>{"layers.0.bias"});
}

TEST(AnyLayer, ConversionReachesTensorsAndSettings) {
  Rng rng(1);
  ListNet net(rng);
  to(net, DType::bf16);
  for (const NamedParameter& parameter : parameters(net)) EXPECT_EQ(parameter.tensor.dtype(), DType::bf16);
  EXPECT_EQ(net.layers[2].as<Gain>()->config.dtype, DType::bf16);
}

TEST(AnyLayer, TheSummaryIsThatOfTheLayers) {
  Rng rng(1);
  const ListNet net(rng);
  const Summary table = summary(net, 2);
  std::vector<std::string> rows;
  for (const SummaryRow& row : table.rows) rows.push_back(row.name + " " + row.kind);
  EXPECT_EQ(rows,
            (std::vector<std::string>{"layers.0 Linear", "layers.2 Gain", "layers.2.inner Linear",
                                      "layers.3.0 LayerNorm", "layers.4.up Linear", "layers.4.down Linear"}));
  EXPECT_EQ(table.rows[1].flops, 8);
  EXPECT_EQ(table.total.parameters, count_parameters(net));
}

TEST(AnyLayer, ErrorsNameTheLayer) {
  Rng rng(1);
  const ListNet net(rng);
  parameters(net);
  const Tensor x = Tensor::zeros({2, 5}, DType::f32, kCpu);
  expect_parts(report_of([&] { net(x); }), {"in layers.0"});
  expect_parts(report_of([&] { net.layers[2](x); }), {"in layers.2.inner"});
  expect_parts(report_of([&] { net.layers[4](x); }), {"in layers.4"});
  AnyLayer from = Gelu{};
  const AnyLayer to = std::move(from);
  expect_error([&] { from(x); }, {"nn::AnyLayer", "moved from"});
  EXPECT_EQ(to(x).shape(), x.shape());
}

TEST(AnyLayer, HoldsAListOfItsOwnKind) {
  Rng rng(1);
  std::vector<AnyLayer> outer;
  outer.push_back(ListNet(rng));
  EXPECT_EQ(parameters(outer).size(), parameters(ListNet(rng)).size());
  EXPECT_EQ(parameters(outer)[3].name, "0.layers.2.inner.weight");
  expect_parts(report_of([&] { outer[0](Tensor::zeros({2, 5}, DType::f32, kCpu)); }), {"in 0.layers.0"});
  EXPECT_EQ(summary(outer, 2).rows.at(1).kind, "Gain");
}

}  // namespace
}  // namespace tessera::nn
