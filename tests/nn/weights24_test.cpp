#include "nn/weights24.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "autograd/tape.h"
#include "nn/mlp.h"
#include "ops/bits/bits.h"
#include "ops/pointwise/pointwise.h"
#include "ops/reduce/reduce.h"
#include "ops/sparse24/weight24.h"
#include "tests/errors.h"
#include "tests/nn/random.h"

namespace tessera::nn {
namespace {

Linear layer_of(Rng& rng, bool tied = false) {
  return Linear(12, 8, rng, kCpu, {.dtype = DType::f64, .tied = tied});
}

std::vector<double> masked(const Linear& layer, const Tensor& mask) {
  return values(ops::mul(layer.weight.detach(), ops::unpack_bits(mask, layer.in, DType::f64)));
}

TEST(Weights24, MultipliesTheMaskedWeightWhileItIsActive) {
  Rng rng(1);
  Linear layer = layer_of(rng);
  const Tensor x = random({5, 12}, 2), residual = random({5, 8}, 3);
  const std::vector<double> dense = values(layer(x, residual));
  set_weights24(layer);
  EXPECT_STREQ(name_of(layer.form), "weights24");
  EXPECT_EQ(multiply_adds(layer.form, 12, 8), 96);
  const std::vector<double> sparse = values(layer(x, residual));
  EXPECT_EQ(sparse,
            values(ops::weight24_linear(x, layer.weight, weights24_of(layer)->mask, layer.bias, residual)));
  EXPECT_NE(sparse, dense);
  weights24_of(layer)->active = false;
  EXPECT_EQ(values(layer(x, residual)), dense);
}

TEST(Weights24, DrawsTheWeightGradientFromTheGeneratorThatItIsGiven) {
  Rng rng(1), drawn(5), same(5);
  Linear layer = layer_of(rng);
  const Tensor x = random({8, 12}, 2);
  const auto gradient = [&](Linear& of) {
    Tape tape;
    tape.backward(ops::sum(of(x)));
    const std::vector<double> found = values(grad(of.weight));
    zero_grad(of.weight);
    return found;
  };
  set_weights24(layer);
  const std::vector<double> whole = gradient(layer);
  layer.form = Dense{};
  set_weights24(layer, drawn);
  const std::vector<double> first = gradient(layer), second = gradient(layer);
  EXPECT_NE(first, whole);
  EXPECT_NE(second, first);
  const Form captured = layer.form;
  weights24_of(layer)->mvue = same;
  EXPECT_NE(layer.form, captured);  // a captured step draws from the other one
  EXPECT_EQ(gradient(layer), first);
  weights24_of(layer)->active = false;
  const Rng::State before = same.state();
  gradient(layer);
  EXPECT_EQ(same.state(), before);  // a dense step draws nothing
}

TEST(Weights24, AnMlpCallsItsLayersByThemselves) {
  Rng rng(1);
  for (const bool gated : {true, false}) {
    Mlp mlp(12, 16, rng, kCpu, {.gated = gated, .bias = false, .dtype = DType::f64});
    const Tensor x = random({5, 12}, 2);
    const std::vector<double> dense = values(mlp(x));
    set_weights24(mlp.up), set_weights24(mlp.down);
    const std::vector<double> sparse = values(mlp(x));
    Mlp by_hand(12, 16, rng, kCpu, {.gated = gated, .bias = false, .dtype = DType::f64});
    by_hand.up.weight.copy_from(
        Tensor::from(masked(mlp.up, weights24_of(mlp.up)->mask), mlp.up.weight.shape()));
    by_hand.down.weight.copy_from(
        Tensor::from(masked(mlp.down, weights24_of(mlp.down)->mask), mlp.down.weight.shape()));
    const std::vector<double> expected = values(by_hand(x));
    for (size_t i = 0; i < sparse.size(); ++i) EXPECT_NEAR(sparse[i], expected[i], 1e-12);
    EXPECT_NE(sparse, dense);
  }
}

TEST(Weights24, RefreshesTheMaskInPlaceAndCountsWhatChanged) {
  Rng rng(1);
  Linear layer = layer_of(rng);
  set_weights24(layer);
  Weights24& form = *weights24_of(layer);
  const Form before = layer.form;
  refresh_weights24(layer);
  EXPECT_EQ(form.flips.item<double>(), 0);  // the weight is as it was
  const std::vector<double> old = values(ops::unpack_bits(form.mask, 12, DType::f64));
  layer.weight.detach().copy_from(random({8, 12}, 9));
  EXPECT_EQ(values(ops::unpack_bits(form.mask, 12, DType::f64)), old);  // until the next refresh
  refresh_weights24(layer);
  const std::vector<double> now = values(ops::unpack_bits(form.mask, 12, DType::f64));
  EXPECT_EQ(now, values(ops::unpack_bits(ops::transposable24(layer.weight), 12, DType::f64)));
  int64_t flips = 0;
  for (size_t i = 0; i < old.size(); ++i) flips += old[i] != now[i];
  EXPECT_GT(flips, 0);
  EXPECT_EQ(form.flips.item<double>(), double(flips));
  // A captured step reads the new mask, but one that switches is captured again.
  EXPECT_EQ(layer.form, before);
  form.active = false;
  EXPECT_NE(layer.form, before);
}

TEST(Weights24, IsStateOfTheModelAndNotTrained) {
  Rng rng(1);
  Linear layer = layer_of(rng);
  set_weights24(layer);
  std::vector<std::string> names;
  for_each_field(layer, [&](const std::string& name, auto&) { names.push_back(name); });
  for (const char* const name : {"form.mask", "form.flips", "form.active"})
    EXPECT_NE(std::ranges::find(names, name), names.end()) << name;
  EXPECT_EQ(parameters(layer).size(), 2u);
}

TEST(Weights24, DecaysWhatIsPrunedAndShowsWhatIsMultiplied) {
  Rng rng(1);
  Linear layer = layer_of(rng);
  EXPECT_FALSE(masked_decay(layer).defined());
  set_weights24(layer);
  const Tensor mask = weights24_of(layer)->mask;
  const std::vector<double> dense = values(layer.weight), sparse = masked(layer, mask);
  {
    Tape tape;
    tape.backward(masked_decay(layer));
    const std::vector<double> gradient = values(grad(layer.weight));
    for (size_t i = 0; i < dense.size(); ++i) EXPECT_EQ(gradient[i], dense[i] - sparse[i]);
  }
  EXPECT_EQ(values(masked_weight(layer)), sparse);
  EXPECT_EQ(values(layer.weight), dense);
  weights24_of(layer)->active = false;
  EXPECT_FALSE(masked_decay(layer).defined());
  EXPECT_EQ(values(masked_weight(layer)), dense);
}

TEST(Weights24, RefusesWhatItCannotBe) {
  Rng rng(1);
  Linear tied = layer_of(rng, true), scaled = layer_of(rng);
  scaled.form = Scaled{2};
  EXPECT_NE(message_of([&] { set_weights24(tied); }).find("is tied to another's weight"), std::string::npos);
  EXPECT_EQ(message_of([&] { set_weights24(scaled); }),
            "weights24: the layer has the form scaled; 2:4 weights are masks of dense ones");
  EXPECT_NE(message_of([&] { refresh_weights24(scaled); }).find("nn::set_weights24 gives it"),
            std::string::npos);
  Linear layer = layer_of(rng);
  set_weights24(layer);
  GroupedMlp grouped(2, 3, 7, 5, rng, kCpu, {.bias = false, .dtype = DType::f64});
  grouped.up.form = layer.form;
  EXPECT_NE(message_of([&] {
              grouped(random({4, 3}, 2));
            }).find("have no weights24 form"),
            std::string::npos);
}

}  // namespace
}  // namespace tessera::nn
