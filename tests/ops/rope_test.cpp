#include "ops/rope/rope.h"

#include <gtest/gtest.h>

#include <cmath>
#include <complex>

#include "ops/rope/rope_table.h"
#include "tests/errors.h"
#include "tests/ops/expect.h"
#include "tests/ops/tensors.h"

namespace tessera::ops {
namespace {

TEST(Rope, TurnsThePairsOfAHeadAsComplexNumbers) {
  for (const Device device : devices()) {
    const Tensor x = sines({2, 5, 3, 8}, device, 1, 1);
    const RopeOptions options{.base = 100};
    const auto y = rope(x, rope_table(options, 8, 20, DType::f32, device), 7).to_vector<double>();
    const auto from = x.to_vector<double>();
    for (size_t b = 0; b < 2; ++b)
      for (size_t t = 0; t < 5; ++t)
        for (size_t h = 0; h < 3; ++h)
          for (size_t i = 0; i < 4; ++i) {
            const size_t at = ((b * 5 + t) * 3 + h) * 8 + i;
            const double angle = double(7 + t) * std::pow(100.0, -double(i) / 4);
            const std::complex<double> turned = std::complex(from[at], from[at + 4]) * std::polar(1.0, angle);
            EXPECT_NEAR(y[at], turned.real(), 1e-6);  // an ulp or two of values near 1
            EXPECT_NEAR(y[at + 4], turned.imag(), 1e-6);
          }
  }
}

TEST(Rope, ScoresDependOnTheDistanceAlone) {
  // What the embedding is for: <rope(q, m), rope(k, n)> is a function of m - n.
  const Tensor q = sines({1, 1, 1, 16}, Device::cpu(), 1, 1).to(DType::f64),
               k = sines({1, 1, 1, 16}, Device::cpu(), 1, 1).to(DType::f64);
  const Tensor table = rope_table({}, 16, 200, DType::f64);
  const auto score = [&](int64_t m, int64_t n) {
    const auto a = rope(q, table, m).to_vector<double>(), b = rope(k, table, n).to_vector<double>();
    double sum = 0;
    for (size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
    return sum;
  };
  EXPECT_NEAR(score(12, 5), score(157, 150), 1e-12);
  EXPECT_GT(std::abs(score(12, 5) - score(12, 6)), 1e-3);
}

TEST(Rope, PositionsOfATensorEqualThoseOfAnOffset) {
  for (const Device device : devices()) {
    const Tensor x = sines({2, 3, 2, 8}, device, 1, 1), table = rope_table({}, 8, 9, DType::f32, device);
    const auto wanted = rope(x, table, 4).to_vector<float>();
    const Tensor once = Tensor::from(std::vector<int64_t>{4, 5, 6}, {3}, device);
    EXPECT_EQ(rope(x, table, once).to_vector<float>(), wanted);
    const Tensor each = Tensor::from(std::vector<int32_t>{4, 5, 6, 4, 5, 6}, {2, 3}, device);
    EXPECT_EQ(rope(x, table, each).to_vector<float>(), wanted);
  }
}

TEST(Rope, EachSequenceHasItsOwnPositions) {
  for (const Device device : devices()) {
    const Tensor x = sines({2, 3, 2, 8}, device, 1, 1), table = rope_table({}, 8, 9, DType::f32, device);
    const Tensor positions = Tensor::from(std::vector<int64_t>{0, 1, 2, 5, 6, 7}, {2, 3}, device);
    const Tensor y = rope(x, table, positions);
    EXPECT_EQ(y.slice(0, 0, 1).to_vector<float>(), rope(x.slice(0, 0, 1), table, 0).to_vector<float>());
    EXPECT_EQ(y.slice(0, 1, 2).to_vector<float>(), rope(x.slice(0, 1, 2), table, 5).to_vector<float>());
  }
}

TEST(Rope, WhatIsNotTurnedStaysAsItIs) {
  for (const Device device : devices())
    for (const int64_t width : {9, 32}) {  // pair by pair, and in packs
      const Tensor x = sines({1, 2, 2, width}, device, 1, 1),
                   table = rope_table({}, 8, 5, DType::f32, device);
      const Tensor y = rope(x, table, 3);
      EXPECT_EQ(y.slice(3, 8, width).to_vector<float>(), x.slice(3, 8, width).to_vector<float>());
      EXPECT_EQ(y.slice(3, 0, 8).to_vector<float>(), rope(x.slice(3, 0, 8), table, 3).to_vector<float>());
    }
}

TEST(Rope, ReadsHeadsInPlaceFromAWiderRow) {
  // As a model has them: the queries of fused rows [B, T, (H + 2) D].
  for (const Device device : devices()) {
    const Tensor rows = sines({2, 3, 5 * 8}, device, 1, 1);
    const Tensor view = rows.slice(-1, 8, 32).reshape({2, 3, 3, 8});
    const Tensor table = rope_table({}, 8, 3, DType::f32, device);
    EXPECT_EQ(rope(view, table).to_vector<float>(), rope(view.clone(), table).to_vector<float>());
  }
}

TEST(Rope, APositionOutsideTheTableIsAnErrorOrNaN) {
  const Tensor x = sines({1, 2, 1, 4}, Device::cpu(), 1, 1), table = rope_table({}, 4, 3);
  EXPECT_EQ(message_of([&] { rope(x, table, 2); }),
            "rope: 2 tokens from position 2 do not fit table f32[3, 4] on cpu of 3 positions");
  EXPECT_EQ(message_of([&] {
              rope(x, table, Tensor::from(std::vector<int64_t>{0, 3}, {2}));
            }),
            "rope: position 3 at element 1 of positions i64[2] on cpu is outside [0, 3), the rows of table "
            "f32[3, 4] on cpu");
  if (Device::cuda_count() == 0) return;
  const Device gpu = Device::cuda(0);
  const auto y =
      rope(x.to(gpu), table.to(gpu), Tensor::from(std::vector<int64_t>{0, 3}, {2}, gpu)).to_vector<float>();
  for (size_t i = 0; i < 8; ++i) EXPECT_EQ(std::isnan(y[i]), i >= 4) << i;
}

TEST(Rope, ErrorsNameWhatIsWrong) {
  const Tensor x = Tensor::zeros({1, 2, 1, 4}, DType::f32, Device::cpu()), table = rope_table({}, 4, 3);
  EXPECT_EQ(message_of([&] { rope(x.select(0, 0), table); }),
            "rope: x is f32[2, 1, 4] on cpu; expected [B, T, H, D]");
  EXPECT_EQ(
      message_of([&] { rope(x, rope_table({}, 6, 3)); }),
      "rope: table is f32[3, 6] on cpu; expected [P, R] with R even and at most 4, the size of a head of x "
      "[1, 2, 1, 4]");
  EXPECT_EQ(
      message_of([&] { rope(x, table.to(DType::f64)); }),
      "rope: table is f64[3, 4] on cpu; expected f32 on the device of x, which is f32[1, 2, 1, 4] on cpu");
  EXPECT_EQ(message_of([&] { rope(x, table, Tensor::zeros({3}, DType::i64, Device::cpu())); }),
            "rope: positions is i64[3] on cpu; expected i64 or i32 [2] or [1, 2]");
  EXPECT_EQ(message_of([&] { rope_table({.scaling = RopeScaling::llama3, .factor = 8}, 4, 3); }),
            "rope: scaling llama3 needs the length of training; trained_length is 0");
  EXPECT_EQ(message_of([&] { parse_rope_scaling("mrope"); }),
            "rope: there is no scaling \"mrope\"; expected none, linear, dynamic, llama3, yarn or longrope");
  RopeOptions longrope{.scaling = RopeScaling::longrope, .factor = 8, .trained_length = 64};
  longrope.short_factor = {1, 2}, longrope.long_factor = {1, 2, 3};
  rope_table(longrope, 4, 64);
  EXPECT_EQ(message_of([&] { rope_table(longrope, 4, 65); }),
            "rope: longrope has 3 factors for sequences of 65 tokens; expected 2, one for each pair of the 4 "
            "rotated elements");
  longrope.long_factor = {1, 0};
  EXPECT_EQ(message_of([&] { rope_table(longrope, 4, 65); }),
            "rope: long_factor[1] is 0; expected a positive number");
  longrope.trained_length = 1;
  EXPECT_EQ(message_of([&] { longrope.validate(); }),
            "rope: longrope needs a length of training of 2 or more; trained_length is 1");
}

TEST(Rope, LengthsOfWhichTheAnglesAreTheSame) {
  const auto same = [](RopeScaling scaling, int64_t a, int64_t b) {
    return rope_same_angles({.scaling = scaling, .factor = 2, .trained_length = 64}, a, b) &&
           rope_same_angles({.scaling = scaling, .factor = 2, .trained_length = 64}, b, a);
  };
  for (const RopeScaling scaling :
       {RopeScaling::none, RopeScaling::linear, RopeScaling::llama3, RopeScaling::yarn})
    EXPECT_TRUE(same(scaling, 1, 1000));
  for (const RopeScaling scaling : {RopeScaling::dynamic, RopeScaling::longrope}) {
    EXPECT_TRUE(same(scaling, 1, 64));
    EXPECT_FALSE(same(scaling, 64, 65));
    EXPECT_TRUE(same(scaling, 100, 100));
  }
  EXPECT_FALSE(same(RopeScaling::dynamic, 65, 66));
  EXPECT_TRUE(same(RopeScaling::longrope, 65, 1000));
}

/// Angles of position 1 as transformers 5.23 computes them in f32 (LlamaRotaryEmbedding, R = 16).
TEST(Rope, FrequenciesAreThoseOfTransformers) {
  const auto expect = [](const RopeOptions& options, int64_t length, const std::vector<double>& wanted) {
    const auto frequencies = rope_frequencies(options, 16, length);
    ASSERT_EQ(frequencies.size(), wanted.size());
    for (size_t i = 0; i < wanted.size(); ++i)
      EXPECT_NEAR(frequencies[i], wanted[i], 2e-6 * wanted[i])  // a few roundings of f32
          << name_of(options.scaling) << " " << i;
  };
  expect({}, 100,
         {1.0, 0.3162277638912201, 0.10000000149011612, 0.03162277862429619, 0.009999999776482582,
          0.003162277862429619, 0.0010000000474974513, 0.0003162277862429619});
  expect({.scaling = RopeScaling::linear, .factor = 4}, 100,
         {0.25, 0.07905694097280502, 0.02500000037252903, 0.007905694656074047, 0.0024999999441206455,
          0.0007905694656074047, 0.0002500000118743628, 7.905694656074047e-05});
  const RopeOptions dynamic{.scaling = RopeScaling::dynamic, .factor = 2, .trained_length = 64};
  expect(dynamic, 100,
         {1.0, 0.28394514322280884, 0.08062484115362167, 0.0228930301964283, 0.0065003652125597,
          0.0018457469996064901, 0.0005240908940322697, 0.00014881306560710073});
  EXPECT_EQ(rope_frequencies(dynamic, 16, 64), rope_frequencies({}, 16, 64));
  expect({.scaling = RopeScaling::llama3, .factor = 8, .trained_length = 64}, 100,
         {1.0, 0.24438458681106567, 0.013042256236076355, 0.0039528473280370235, 0.0012499999720603228,
          0.00039528473280370235, 0.0001250000059371814, 3.9528473280370235e-05});
  const RopeOptions yarn{.scaling = RopeScaling::yarn, .factor = 4, .trained_length = 64};
  expect(yarn, 100,
         {1.0, 0.23717081546783447, 0.04999999701976776, 0.007905694656074047, 0.0024999999441206455,
          0.0007905694656074047, 0.0002500000118743628, 7.905694656074047e-05});
  EXPECT_NEAR(rope_attention_factor(yarn), 1.138629436111989, 1e-12);
  const auto row = rope_table(yarn, 16, 100).select(0, 99).to_vector<double>();
  EXPECT_NEAR(row[8 + 1], -1.1348001956939697, 1e-5);  // their angle, 23.5, is rounded to f32 first
  EXPECT_NEAR(row[3], 0.8073311448097229, 1e-5);
  RopeOptions longrope{.scaling = RopeScaling::longrope, .factor = 8, .trained_length = 64};
  longrope.short_factor = {1.0, 1.05, 1.1, 1.2, 1.3, 1.5, 1.7, 2.0};
  longrope.long_factor = {1.0, 1.5, 2.0, 4.0, 8.0, 16.0, 30.0, 32.0};
  expect(longrope, 64,
         {1.0, 0.3011693060398102, 0.09090909361839294, 0.02635231241583824, 0.007692307699471712,
          0.0021081853192299604, 0.0005882352706976235, 0.00015811389312148094});
  expect(longrope, 65,
         {1.0, 0.21081849932670593, 0.05000000074505806, 0.007905694656074047, 0.0012499999720603228,
          0.00019764236640185118, 3.333333370392211e-05, 9.882118320092559e-06});
  EXPECT_NEAR(rope_attention_factor(longrope), 1.224744871391589, 1e-12);
  longrope.attention_factor = 1.5;
  EXPECT_EQ(rope_attention_factor(longrope), 1.5);
}

}  // namespace
}  // namespace tessera::ops
