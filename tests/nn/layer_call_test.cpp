#include "nn/layer_call.h"

#include <gtest/gtest.h>

#include "autograd/tape.h"
#include "nn/activation.h"
#include "nn/linear.h"
#include "nn/sequential.h"
#include "ops/reduce/reduce.h"
#include "tests/errors.h"

/// Errors name the user's line and the layer.

namespace tessera::nn {
namespace {

std::string called_at(int line, const std::string& layer) {
  return "; called at " + std::string(__FILE__) + ":" + std::to_string(line) + (layer.empty() ? "" : " in ") +
         layer;
}

TEST(LayerCall, AnErrorInALayerNamesTheUsersLineAndTheLayer) {
  Rng rng(1);
  const Sequential model{Linear(4, 8, rng), Gelu{}, Linear(9, 2, rng)};
  int line = 0;
  const std::string said = report_of([&] {
    line = __LINE__ + 1;
    model(Tensor::zeros({3, 4}, DType::f32, Device::cpu()));
  });
  EXPECT_TRUE(said.starts_with("linear: ")) << said;
  EXPECT_TRUE(said.ends_with(called_at(line, "2"))) << said;
  EXPECT_EQ(CallScope::current().module, nullptr);
}

TEST(LayerCall, AnErrorInBackwardNamesThemToo) {
  Rng rng(1);
  const Sequential model{Linear(4, 8, rng), Gelu{}, Linear(8, 2, rng)};
  Tape tape;
  const int line = __LINE__ + 1;
  const Tensor loss = ops::sum(model(Tensor::zeros({3, 4}, DType::f32, Device::cpu())));
  std::get<2>(model.layers).weight.detach().fill(1);
  const std::string said = report_of([&] { tape.backward(loss); });
  EXPECT_TRUE(said.starts_with("backward of linear: ")) << said;
  EXPECT_TRUE(said.ends_with(called_at(line, "2"))) << said;
}

/// A model of a user, which does not name itself.
struct Net {
  Linear first, second;
  Tensor operator()(const Tensor& x) const { return second(first(x)); }
  void fields(auto&& visit) { visit("first", first), visit("second", second); }
};

TEST(LayerCall, NamesTheLayersOfAUsersModelOnceItsParametersWereListed) {
  Rng rng(1);
  const Net net{Linear(2, 3, rng), Linear(4, 1, rng)};
  const Tensor x = Tensor::zeros({1, 2}, DType::f32, Device::cpu());
  EXPECT_EQ(report_of([&] { net(x); }).find(" in "), std::string::npos);
  const auto known = parameters(net);
  EXPECT_TRUE(report_of([&] { net(x); }).ends_with(" in second")) << report_of([&] { net(x); });
  parameters(net.second);  // a walk from inside does not shorten names
  EXPECT_TRUE(report_of([&] { net(x); }).ends_with(" in second"));
  const Net copy = net;
  EXPECT_EQ(copy.second.layer_name.get(), nullptr) << "a copy may become part of another model";
}

TEST(LayerCall, AllocatesNothingOnceTheModelIsNamed) {
  Rng rng(1);
  const Linear layer(2, 2, rng);
  const Site site = Site::here();
  { const LayerCall first(layer, site); }
  const char* const name = layer.layer_name.get();
  ASSERT_NE(name, nullptr);
  const LayerCall second(layer, site);
  EXPECT_EQ(CallScope::current().module, name) << "the same interned text";
}

}  // namespace
}  // namespace tessera::nn
