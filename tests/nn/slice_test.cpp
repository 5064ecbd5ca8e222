#include <gtest/gtest.h>

#include "nn/attention.h"
#include "nn/mlp.h"
#include "nn/observe.h"
#include "nn/slice_scope.h"
#include "ops/linear/linear.h"
#include "ops/linear/linear_swiglu.h"
#include "ops/mlp/mlp.h"
#include "ops/pointwise/pointwise.h"
#include "tests/errors.h"
#include "tests/nn/no_recorder.h"
#include "tests/nn/random.h"

namespace tessera::nn {
namespace {

using ops::SelectMode;
using ops::WeightGrad;

/// The gradients of x and of the layer's parameters, for dy.
template <class Layer>
std::vector<std::vector<double>> gradients(Layer& layer, const Tensor& x0, const Tensor& dy) {
  Tensor x = x0.detach();
  require_grad(x);
  zero_grad(layer);
  {
    Tape tape;
    tape.backward(std::vector{layer(x)}, std::vector{dy});
  }
  std::vector<std::vector<double>> all{values_if_defined(grad(x))};
  for (const NamedParameter& one : parameters(layer)) all.push_back(values_if_defined(grad(one.tensor)));
  return all;
}

void expect_near_gradients(const std::vector<std::vector<double>>& a,
                           const std::vector<std::vector<double>>& b, const std::string& what) {
  ASSERT_EQ(a.size(), b.size()) << what;
  for (size_t i = 0; i < a.size(); ++i) {
    ASSERT_EQ(a[i].size(), b[i].size()) << what << " gradient " << i;
    for (size_t j = 0; j < a[i].size(); ++j)
      EXPECT_NEAR(a[i][j], b[i][j], 1e-12) << what << " gradient " << i << " element " << j;
  }
}

TEST(SliceForm, ALinearLayerWithItIsTheSlicedOperator) {
  Rng rng(1), draws(7), same(7);
  Linear layer(5, 4, rng, kCpu, {.dtype = DType::f64});
  layer.form = SlicedBackward{.rows = SelectMode::random, .n = 3, .rng = draws};
  EXPECT_FALSE(is_dense(layer.form));
  EXPECT_STREQ(name_of(layer.form), "slice");
  const Tensor x = random({9, 5}, 2), dy = random({9, 4}, 3);
  const auto of_layer = gradients(layer, x, dy);
  layer.form = SlicedBackward{.rows = SelectMode::random, .n = 3, .rng = same};
  zero_grad(layer);
  Tensor input = x.detach();
  require_grad(input);
  Tape tape;
  const SlicedBackward slice{.rows = SelectMode::random, .n = 3, .rng = same};
  tape.backward(std::vector{ops::linear(input, layer.weight, layer.bias, {}, slice)}, std::vector{dy});
  EXPECT_EQ(of_layer, (std::vector{values_if_defined(grad(input)), values_if_defined(grad(layer.weight)),
                                   values_if_defined(grad(layer.bias))}));
}

TEST(SliceForm, IsSavedWithTheLayerAsItsSettings) {
  Rng rng(1);
  Linear layer(3, 2, rng);
  layer.form = SlicedBackward{.rows = SelectMode::top_norm, .share = 0.5, .weight_grad = WeightGrad::full};
  std::vector<std::string> names;
  for_each_field(layer, [&](const std::string& name, auto&) { names.push_back(name); });
  EXPECT_EQ(names,
            (std::vector<std::string>{"weight", "bias", "form.rows", "form.share", "form.weight_grad"}));
}

TEST(SliceForm, AGraphIsReplayedOnlyWithTheSliceThatItWasCapturedWith) {
  Rng rng(1);
  Mlp mlp(3, 7, rng, kCpu, {.dtype = DType::f64});
  const Tensor x = random({4, 3}, 2);
  Captured step(
      kCpu, [&] { mlp(x); }, std::make_unique<NoRecorder>());
  const auto graphs = [&](const Form& form) {
    mlp.up.form = mlp.down.form = form;
    step(), step();
    return step.graphs();
  };
  EXPECT_EQ(graphs(Dense{}), 1u);
  EXPECT_EQ(graphs(SlicedBackward{.n = 2}), 2u);
  EXPECT_EQ(graphs(SlicedBackward{.n = 2}), 2u);
  EXPECT_EQ(graphs(SlicedBackward{.n = 3}), 3u);
  EXPECT_EQ(graphs(SlicedBackward{.n = 2, .weight_grad = WeightGrad::none}), 4u);
}

// However it is computed (one operator, two, with a gate, observed), a feed-forward network chooses once: the
// gradients of its input and weights are the dense ones of the chosen rows, scaled once.
TEST(SliceForm, AFeedForwardNetworkChoosesOnce) {
  for (const bool gated : {false, true})
    for (const bool bias : {false, true})
      for (const bool observed : {false, true})
        for (const SelectMode mode :
             {SelectMode::first, SelectMode::top_norm, SelectMode::random, SelectMode::importance}) {
          Rng rng(1), draws(7), same(7);
          Mlp mlp(5, 8, rng, kCpu, {.out = 4, .gated = gated, .bias = bias, .dtype = DType::f64});
          const Tensor x = random({9, 5}, 2), dy = random({9, 4}, 3), norms = ops::row_norms(dy);
          const ops::Selection chosen = mode == SelectMode::first      ? ops::Selection::first(9, 3, kCpu)
                                        : mode == SelectMode::top_norm ? ops::Selection::top_norm(norms, 3)
                                        : mode == SelectMode::random
                                            ? ops::Selection::random(9, 3, same, kCpu)
                                            : ops::Selection::importance(norms, 3, same);
          const Tensor scaled =
              ops::scatter_selected(ops::gather_selected(dy, chosen, ops::RowScale::selection), chosen);
          auto expected = gradients(mlp, x, scaled);
          // down's bias is of all rows.
          if (bias) expected.back() = gradients(mlp, x, dy).back();
          mlp.up.form = mlp.down.form = SlicedBackward{.rows = mode, .n = 3, .rng = draws};
          int seen = 0;
          std::optional<Observe> scope;
          if (observed) scope.emplace(mlp, Observer{.forward = [&](const LinearCall&) { ++seen; }});
          expect_near_gradients(gradients(mlp, x, dy), expected,
                                std::string(name_of(mode)) + (gated ? " gated" : "") + (bias ? " bias" : "") +
                                    (observed ? " observed" : ""));
          EXPECT_EQ(seen, observed ? 2 : 0);
          EXPECT_EQ(draws.state().offset,
                    mode == SelectMode::random || mode == SelectMode::importance ? 1u : 0u);
        }
}

TEST(SliceForm, LayersOfANetworkWithSlicesOfTheirOwnChooseEach) {
  Rng rng(1);
  Mlp mlp(5, 8, rng, kCpu, {.dtype = DType::f64});
  const Tensor x = random({9, 5}, 2), dy = random({9, 5}, 3);
  const auto dense = gradients(mlp, x, dy);
  mlp.down.form = SlicedBackward{.n = 3};
  const auto only_down = gradients(mlp, x, dy);
  EXPECT_NE(only_down, dense);
  mlp.up.form = SlicedBackward{.n = 2};
  const auto dx = gradients(mlp, x, dy)[0];
  for (size_t i = 0; i < dx.size(); ++i) EXPECT_EQ(dx[i], i < 10 ? dense[0][i] : 0) << i;
  for (size_t i = 0; i < only_down[0].size(); ++i) EXPECT_EQ(only_down[0][i], i < 15 ? dense[0][i] : 0) << i;
}

TEST(SliceForm, PaddingRowsOfAPassAreNotChosen) {
  Rng rng(1), draws(7);
  Linear layer(5, 4, rng, kCpu, {.dtype = DType::f64});
  const Tensor x = random({9, 5}, 2), dy = random({9, 4}, 3);
  const AttentionPass pass{.cu_seqlens = Tensor::from(std::vector<int64_t>{0, 2, 5}, {3})};
  EXPECT_EQ(pass.valid_rows().to_vector<int64_t>(), (std::vector<int64_t>{5}));
  for (const SelectMode mode :
       {SelectMode::first, SelectMode::top_norm, SelectMode::random, SelectMode::importance}) {
    layer.form = SlicedBackward{.rows = mode, .n = 7, .rng = draws};
    const auto rows_of = [&](const auto& all) {
      std::vector<int64_t> rows;
      for (int64_t row = 0; row < 9; ++row)
        if (all[0][size_t(row * 5)] != 0) rows.push_back(row);
      return rows;
    };
    EXPECT_EQ(rows_of(gradients(layer, x, dy)).size(), 7u) << name_of(mode);
    const SliceScope scope(&pass);
    EXPECT_EQ(rows_of(gradients(layer, x, dy)), (std::vector<int64_t>{0, 1, 2, 3, 4})) << name_of(mode);
    {
      const SliceScope all_rows(nullptr);
      EXPECT_EQ(rows_of(gradients(layer, x, dy)).size(), 7u) << name_of(mode);
    }
    layer.form = SlicedBackward{.rows = mode, .share = 0.4, .rng = draws};
    EXPECT_EQ(rows_of(gradients(layer, x, dy)).size(), 2u) << "of 5 rows, not of 9: " << name_of(mode);
  }
}

TEST(SliceForm, GroupedLayersRefuseIt) {
  Rng rng(1);
  GroupedMlp mlp(2, 3, 7, 5, rng, kCpu, {.dtype = DType::f64});
  mlp.up.form = SlicedBackward{.n = 2};
  EXPECT_EQ(message_of([&] {
              mlp(random({4, 3}, 2));
            }),
            "nn: a grouped linear layer has no sliced backward pass (its slice: first 2, weight_grad slice); "
            "set its form to Dense");
  EXPECT_NE(report_of([&] { mlp(random({4, 3}, 2)); }).find("in up"), std::string::npos);
}

}  // namespace
}  // namespace tessera::nn
