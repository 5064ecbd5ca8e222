#include <gtest/gtest.h>

#include "nn/attention.h"
#include "nn/linear.h"
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
  fill_normal(x, 0, 1, rng);
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

}  // namespace
}  // namespace tessera::nn
