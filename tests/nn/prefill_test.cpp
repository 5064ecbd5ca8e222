#include <gtest/gtest.h>

#include "autograd/tape.h"
#include "nn/attention.h"
#include "nn/mlp.h"
#include "nn/observe.h"
#include "nn/prefill_scope.h"
#include "tests/nn/random.h"

// Gates that begin within a text.

namespace tessera::nn {
namespace {

TEST(PrefillScope, GatesTheLastTokensOfEachText) {
  using Ranges = PrefillScope::Ranges;
  EXPECT_FALSE(PrefillScope::gated_rows(9, 0.5).has_value());
  const Sequences sequences{{4, 1, 3, 1}};
  const PrefillScope scope(&sequences);
  EXPECT_EQ(PrefillScope::gated_rows(9, 0.5), (Ranges{{2, 4}, {4, 5}, {7, 8}, {8, 9}}));
  EXPECT_EQ(PrefillScope::gated_rows(9, 0), (Ranges{{4, 5}, {8, 9}}));
  EXPECT_FALSE(PrefillScope::gated_rows(9, 1).has_value());
  EXPECT_THROW(PrefillScope::gated_rows(8, 0.5), Error);
  const PrefillScope none(nullptr);
  EXPECT_FALSE(PrefillScope::gated_rows(8, 0.5).has_value());
}

TEST(PrefillScope, ALayerLeavesOutInputsOfTheseTokensAlone) {
  Rng rng(1);
  Linear layer(6, 5, rng);
  const Tensor dense = layer.weight.detach().clone(), x = Tensor::empty({7, 6}, DType::f32, Device::cpu());
  ops::fill_normal(x, 0, 1, rng);
  const ops::Gate gate{.kind = ops::Gate::Kind::threshold, .threshold = 0.7},
      other{.kind = ops::Gate::Kind::top_k, .keep = 2};
  const auto columns = [&](int64_t begin, int64_t end) {
    return ops::compress(dense.slice(0, begin, end), ops::SparseFormat::dense_columns);
  };
  Compressed form;
  form.parts = {{columns(0, 2), gate}, {columns(2, 5), other}};
  form.prefill = 0.5;
  layer.weight = Tensor();
  layer.form = form;
  const NoTape no_tape;
  const Tensor all = layer(x);  // without a scope every row is gated
  form.parts[0].gate = form.parts[1].gate = {};
  Linear open(6, 5, rng);
  open.weight = Tensor(), open.bias = layer.bias, open.form = form;
  const Tensor none = open(x);
  const Sequences sequences{{4, 3}};
  const PrefillScope scope(&sequences);
  const Tensor some = layer(x);
  for (int64_t t = 0; t < 7; ++t) {
    const bool gated = t == 2 || t == 3 || t == 6;
    const Tensor& expected = gated ? all : none;
    for (int64_t j = 0; j < 5; ++j) EXPECT_EQ(some.at({t, j}).item(), expected.at({t, j}).item()) << t << j;
    EXPECT_NE(all.at({t, 0}).item(), none.at({t, 0}).item());
  }
}

TEST(PrefillScope, OfACompressedMlpWithGatedInputsHoldsForGateAndUp) {
  // Gate and up are one operator but where the network is observed, or where gates spare some tokens.
  Rng rng(1);
  Mlp mlp(6, 5, rng, {.gated = true, .bias = false});
  const Tensor x = Tensor::empty({7, 6}, DType::f32, Device::cpu());
  ops::fill_normal(x, 0, 1, rng);
  const Tensor dense = mlp.up.weight.detach().clone();
  const auto rows = [&](int64_t begin) {
    return ops::compress(dense.slice(0, begin, begin + 5), ops::SparseFormat::sell_delta4);
  };
  Compressed form;
  form.parts = {{rows(0), {.kind = ops::Gate::Kind::threshold, .threshold = 0.7}},
                {rows(5), {.kind = ops::Gate::Kind::top_k, .keep = 2}}};
  form.prefill = 0.5;
  mlp.up.weight = Tensor();
  mlp.up.form = form;
  const NoTape no_tape;
  const auto observed = [&] {
    int calls = 0;
    const Observe scope(mlp, {.forward = [&](const LinearCall&) { ++calls; }});
    const std::vector<float> y = mlp(x).to_vector<float>();
    EXPECT_EQ(calls, 2);
    return y;
  };
  const std::vector<float> all = mlp(x).to_vector<float>();
  EXPECT_EQ(all, mlp.down(ops::sparse_linear_swiglu(x, form.parts[0], form.parts[1])).to_vector<float>());
  EXPECT_EQ(all, observed());
  const Sequences sequences{{4, 3}};
  const PrefillScope scope(&sequences);
  const std::vector<float> some = mlp(x).to_vector<float>();
  EXPECT_NE(some, all);
  EXPECT_EQ(some, observed());
}

}  // namespace
}  // namespace tessera::nn
