#include "ops/sparse24/sparse24.h"

#include <gtest/gtest.h>

#include <cmath>

#include "autograd/tape.h"
#include "ops/gemm/gemm.h"
#include "ops/random/random.h"
#include "ops/sparse24/multiply24_internal.h"
#include "ops/sparse24/sparse24_kernels.h"
#include "ops/sparse24/sparse24_linear.h"
#include "ops/sparse24/sparse24_math.h"
#include "ops/variant.h"
#include "tests/errors.h"
#include "tests/ops/guarded.h"
#include "tests/ops/tensors.h"

namespace tessera::ops {
namespace {

using namespace sparse24;

/// What `selection` keeps of one group.
std::vector<double> kept_of_group(const std::vector<double>& group, const Selection24& selection = {},
                                  DType dtype = DType::f64) {
  const Tensor x = Tensor::from(group, {1, int64_t(group.size())}).to(dtype);
  return decompress24(compress24(x, Along24::features, selection)).to_vector<double>();
}
Selection24 method(Method24 which, float scale = 1) {
  return {.method = which, .scale = Tensor::from(std::vector<float>{scale}, {1})};
}

/// Bits, so that NaN equals itself and -0 differs from 0.
std::vector<uint64_t> bits(const std::vector<double>& values) {
  std::vector<uint64_t> words;
  for (const double value : values) words.push_back(std::bit_cast<uint64_t>(value));
  return words;
}

// ---- which two ----

TEST(Sparse24, NaiveKeepsTheTwoLargestAndOfTiesTheFirst) {
  EXPECT_EQ(kept_of_group({1, -4, 3, 2}), (std::vector<double>{0, -4, 3, 0}));
  EXPECT_EQ(kept_of_group({2, 2, 2, 2}), (std::vector<double>{2, 2, 0, 0}));
  EXPECT_EQ(kept_of_group({1, 2, -2, 2}), (std::vector<double>{0, 2, -2, 0}));
  EXPECT_EQ(kept_of_group({0, 0, 0, 5}), (std::vector<double>{0, 0, 0, 5}));
  EXPECT_EQ(kept_of_group({3, 1, 2, 4}), (std::vector<double>{3, 0, 0, 4}));
  EXPECT_EQ(kept_of_group({1, 2, 3, 4}), (std::vector<double>{0, 0, 3, 4}));
}

TEST(Sparse24, NanAndInfinityStayAndNegativeZeroKeepsItsSign) {
  for (const DType dtype : {DType::f64, DType::f32, DType::bf16, DType::f16}) {
    EXPECT_TRUE(std::isnan(kept_of_group({1, kNan, 5, kInf}, {}, dtype)[1])) << dtype;
    EXPECT_EQ(kept_of_group({1, kNan, 5, kInf}, {}, dtype)[3], kInf) << dtype;
    EXPECT_EQ(kept_of_group({1, kNan, 5, kInf}, {}, dtype)[2], 0) << dtype;
    EXPECT_EQ(bits(kept_of_group({0, -0.0, 0, 0}, {}, dtype)), bits({0, -0.0, 0, 0})) << dtype;
    // A zero of either sign is no larger than another.
    EXPECT_EQ(bits(kept_of_group({0, 0, -0.0, 3}, {}, dtype)), bits({0, 0, 0, 3})) << dtype;
  }
}

TEST(Sparse24, TheTwoLargestAgreeWithASortForAllOrders) {
  for (int code = 0; code < 256; ++code) {
    float x[4];
    for (int i = 0; i < 4; ++i) x[i] = float((code >> 2 * i & 3) - 1);
    std::vector<int> order{0, 1, 2, 3};
    std::stable_sort(order.begin(), order.end(),
                     [&](int a, int b) { return std::abs(x[a]) > std::abs(x[b]); });
    const Positions at = two_largest(x);
    EXPECT_EQ(at.first, std::min(order[0], order[1])) << code;
    EXPECT_EQ(at.second, std::max(order[0], order[1])) << code;
    EXPECT_EQ(third_largest(x, at), std::abs(x[order[2]])) << code;
  }
}

TEST(Sparse24, FastTakesTheFirstTwo) {
  EXPECT_EQ(kept_of_group({1, 2, 9, 9}, method(Method24::fast)), (std::vector<double>{1, 2, 0, 0}));
}

TEST(Sparse24, SoftThresholdSubtractsTheThirdLargest) {
  EXPECT_EQ(kept_of_group({-5, 1, 3, 2}, method(Method24::soft_threshold, 2)),
            (std::vector<double>{-6, 0, 2, 0}));
  EXPECT_EQ(kept_of_group({4, 4, -4, 1}, method(Method24::soft_dynamic, 2)),
            (std::vector<double>{0, 0, 0, 0}));
}

TEST(Sparse24, SoftScaleIsTheBestInTheMeanSquare) {
  const Tensor x = drawn({40, 24}, 3);
  for (const Along24 along : {Along24::features, Along24::tokens}) {
    const double scale = soft_scale(x, along).item();
    const auto error = [&](double tried) {
      const Tensor y = decompress24(compress24(x, along, method(Method24::soft_threshold, float(tried))));
      double sum = 0;
      const auto a = x.to_vector<double>(), b = y.to_vector<double>();
      for (size_t i = 0; i < a.size(); ++i) sum += (a[i] - b[i]) * (a[i] - b[i]);
      return sum;
    };
    EXPECT_LT(error(scale), error(scale * 1.01));
    EXPECT_LT(error(scale), error(scale * 0.99));
  }
  EXPECT_EQ(soft_scale(Tensor::zeros({4, 4}, DType::f32, Device::cpu())).item(), 1);
  const Tensor one = Tensor::from(std::vector<double>{8, 7, 7, 0}, {1, 4});  // s = (1, 0): 8
  EXPECT_EQ(soft_scale(one).item(), 8);
  EXPECT_EQ(soft_scale(one, Along24::features, 0, true).item(), 2);
  // Two samples of eight tokens are tokens 0 and 4, here with s = (1, 0): 8; the others have s = (4, 0): 2.
  std::vector<double> rows;
  for (int token = 0; token < 8; ++token)
    for (const double value : {8.0, token % 4 == 0 ? 7.0 : 4.0, token % 4 == 0 ? 7.0 : 4.0, 0.0})
      rows.push_back(value);
  const Tensor tokens = Tensor::from(rows, {8, 4});
  EXPECT_EQ(soft_scale(tokens, Along24::features, 2).item(), 8);
  EXPECT_LT(soft_scale(tokens).item(), 3);
}

TEST(Sparse24, SamplesAreSpreadOverAnyNumberOfUnits) {
  for (const int64_t units : {1, 7, 40})
    for (int64_t samples = 1; samples <= units; ++samples)
      for (int64_t i = 0; i < samples; ++i)
        EXPECT_EQ(sparse24::unit_of_sample(i, units, samples), i * units / samples);
  constexpr int64_t kUnits = 4'000'000'000;  // squared more than an int64_t holds
  EXPECT_EQ(sparse24::unit_of_sample(kUnits - 1, kUnits, kUnits), kUnits - 1);
}

TEST(Sparse24, TheDynamicScaleIsRefreshedAtItsInterval) {
  DynamicScale24 dynamic{.interval = 3, .samples = 4};
  const Tensor a = drawn({9, 8}, 1), b = drawn({9, 8}, 2);
  const double of_a = soft_scale(a, Along24::features, 4, true).item(),
               of_b = soft_scale(b, Along24::features, 4, true).item();
  ASSERT_NE(of_a, of_b);
  EXPECT_EQ(dynamic.next(a).item(), of_a);
  EXPECT_EQ(dynamic.next(b).item(), of_a);
  EXPECT_EQ(dynamic.next(b).item(), of_a);
  EXPECT_EQ(dynamic.next(b).item(), of_b);
  EXPECT_EQ(dynamic.step, 4);
}

// ---- mvue ----

TEST(Sparse24, TheMeanOfMvueOverAllDrawsIsExact) {
  Rng rng(7);
  const Tensor groups = Tensor::empty({200, 4}, DType::f64, Device::cpu());
  fill_normal(groups, 0, 1, rng);
  std::vector<double> all = groups.to_vector<double>();
  for (const double special :
       {1.0, 0.0, 0.0, 0.0, 1e-3, 2.0, 2.0, 0.0, 5.0, 5.0, 5.0, 5.0, 1e30, 1.0, -1e20, 3.0})
    all.push_back(special);
  for (size_t at = 0; at < all.size(); at += 4) {
    double x[4], mean[4] = {}, total = 0;
    std::copy_n(all.begin() + int64_t(at), 4, x);
    float a[4];
    ASSERT_TRUE(draw_weights(x, a));
    double sum = 0, most = 0;
    for (int i = 0; i < 4; ++i) sum += double(a[i]), most = std::max(most, std::abs(x[i]));
    for (int i = 0; i < 4; ++i)
      for (int j = 0; j < 4; ++j) {
        if (i == j) continue;
        double others = 0;
        for (int l = 0; l < 4; ++l)
          if (l != i) others += double(a[l]);
        const double chance = double(a[i]) / sum * (double(a[j]) / others);
        total += chance;
        for (const int kept_one : {i, j})
          mean[kept_one] += chance * x[kept_one] / inclusion<double>(a, kept_one);
      }
    EXPECT_NEAR(total, 1, 1e-12);
    for (int i = 0; i < 4; ++i) EXPECT_NEAR(mean[i], x[i], 1e-12 * most) << at / 4 << " " << i;
  }
}

TEST(Sparse24, TenThousandDrawsOfMvueAreWithinThreeSigma) {
  const double x[4] = {1, -2, 0.5, 4};
  Rng rng(11);
  float a[4];
  ASSERT_TRUE(draw_weights(x, a));
  double sum[4] = {};
  constexpr int kDraws = 10000;
  // 100 streams of 100 groups.
  std::vector<double> tiled;
  for (int i = 0; i < 100; ++i) tiled.insert(tiled.end(), x, x + 4);
  const Tensor group = Tensor::from(tiled, {10, 40});
  for (int i = 0; i < kDraws / 100; ++i) {
    const auto y = decompress24(compress24(group, Along24::features, Selection24::mvue(rng, Device::cpu())))
                       .to_vector<double>();
    for (size_t e = 0; e < y.size(); ++e) sum[e % 4] += y[e];
  }
  for (int i = 0; i < 4; ++i) {
    const double p = inclusion<double>(a, i), sigma = std::abs(x[i]) * std::sqrt((1 - p) / p / kDraws);
    EXPECT_NEAR(sum[i] / kDraws, x[i], 3 * sigma) << i;
  }
}

TEST(Sparse24, DrawsDependOnSeedStreamAndElementAlone) {
  const Tensor x = drawn({70, 90}, 5);
  const auto drawn = [&](const Tensor& of, uint64_t seed, int streams, Along24 along = Along24::features) {
    Rng rng(seed);
    for (int i = 1; i < streams; ++i) rng.reserve(Device::cpu());
    return decompress24(compress24(of, along, Selection24::mvue(rng, Device::cpu()))).to_vector<double>();
  };
  EXPECT_EQ(drawn(x, 1, 1), drawn(x, 1, 1));
  EXPECT_NE(drawn(x, 1, 1), drawn(x, 2, 1));
  EXPECT_NE(drawn(x, 1, 1), drawn(x, 1, 2));
  EXPECT_NE(drawn(x, 1, 1), drawn(x, 1, 1, Along24::tokens));
  EXPECT_EQ(drawn(x, 1, 1), drawn(x.transpose(0, 1).clone().transpose(0, 1), 1, 1));
  // Neighbouring groups that hold the same are not drawn the same.
  const auto same = drawn(Tensor::full({64, 64}, 1, DType::f64, Device::cpu()), 3, 1);
  EXPECT_FALSE(std::equal(same.begin(), same.begin() + 64, same.begin() + 64));
  EXPECT_FALSE(std::equal(same.begin() + 4, same.begin() + 64, same.begin() + 64));
  int64_t first_of_group = 0;
  for (size_t i = 0; i < same.size(); i += 4) first_of_group += same[i] != 0;
  EXPECT_NEAR(double(first_of_group) / 1024, 0.5, 3 * 0.5 / 32);
}

TEST(Sparse24, MvueKeepsWhatIsNotFiniteAsNaiveDoes) {
  Rng rng(1);
  const auto y = kept_of_group({kInf, 1, 2, kNan}, Selection24::mvue(rng, Device::cpu()));
  EXPECT_EQ(y[0], kInf);
  EXPECT_TRUE(std::isnan(y[3]));
  // The largest and the smallest numbers there are.
  for (const double value : {3e38, 1e-44}) {
    const auto kept_ones =
        kept_of_group({value, value, value, value}, Selection24::mvue(rng, Device::cpu()), DType::f64);
    for (const double one : kept_ones) EXPECT_TRUE(one == 0 || std::abs(one / value - 2) < 1e-6) << one;
  }
}

// ---- both ways ----

TEST(Sparse24, GroupsAlongTokensAreThoseOfTheTranspose) {
  for (const auto& [tokens, features] : {std::pair<int64_t, int64_t>{5, 7}, {64, 128}, {131, 67}}) {
    const Tensor x = drawn({tokens, features}, 9);
    const Sparse24 by_tokens = compress24(x, Along24::tokens),
                   of_transpose = compress24(x.transpose(0, 1), Along24::features);
    EXPECT_EQ(by_tokens.values.to_vector<double>(), of_transpose.values.to_vector<double>());
    EXPECT_EQ(by_tokens.metadata.to_vector<int32_t>(), of_transpose.metadata.to_vector<int32_t>());
    EXPECT_EQ(by_tokens.m(), features);
    EXPECT_EQ(by_tokens.k(), tokens);
    EXPECT_EQ(decompress24(by_tokens).to_vector<double>(),
              decompress24(of_transpose).transpose(0, 1).to_vector<double>());
  }
}

TEST(Sparse24, WhatFeaturesDropTokensDoNotBringBack) {
  const Tensor x = drawn({64, 64}, 13);
  const BothWays24 both = compress24_both(x);
  const auto first = decompress24(both.by_features).to_vector<double>(),
             second = decompress24(both.by_tokens).to_vector<double>(), all = x.to_vector<double>();
  int64_t kept_twice = 0;
  for (size_t i = 0; i < all.size(); ++i) {
    EXPECT_TRUE(first[i] == 0 || first[i] == all[i]);
    EXPECT_TRUE(second[i] == 0 || second[i] == first[i]) << i;
    kept_twice += second[i] != 0;
  }
  EXPECT_GT(kept_twice, 64 * 64 / 4);
  EXPECT_EQ(decompress24(compress24(decompress24(both.by_features), Along24::tokens)).to_vector<double>(),
            second);
}

/// With every method and in every dtype: what is kept first is rounded before the second choice.
TEST(Sparse24, BothWaysAreOneAfterTheOther) {
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16})
    for (const Method24 which : {Method24::naive, Method24::mvue, Method24::soft_threshold, Method24::fast}) {
      const Tensor x = drawn({66, 130}, 17, dtype);
      Selection24 selection = method(which, 1.5f);
      selection.stream = {.seed = 5, .delta = 2};
      const BothWays24 both = compress24_both(x, selection);
      const Sparse24 first = compress24(x, Along24::features, selection),
                     second = compress24(decompress24(first), Along24::tokens, selection);
      EXPECT_EQ(both.by_features.values.to_vector<float>(), first.values.to_vector<float>());
      EXPECT_EQ(both.by_tokens.values.to_vector<float>(), second.values.to_vector<float>());
      EXPECT_EQ(both.by_tokens.metadata.to_vector<int32_t>(), second.metadata.to_vector<int32_t>());
    }
}

TEST(Sparse24, AGradientIsTakenAtThePlacesOfItsActivation) {
  const Tensor x = drawn({37, 70}, 1), dy = drawn({37, 70}, 2);
  for (const Along24 along : {Along24::features, Along24::tokens}) {
    const Sparse24 pattern = compress24(x, along);
    const auto y = decompress24(compress24_like(dy, pattern)).to_vector<double>(),
               mask = decompress24(pattern).to_vector<double>(), all = dy.to_vector<double>();
    for (size_t i = 0; i < all.size(); ++i) EXPECT_EQ(y[i], mask[i] != 0 ? all[i] : 0) << i;
    EXPECT_EQ(masked24(dy, pattern).to_vector<double>(), y);
  }
}

TEST(Sparse24, EmptyAndOddExtentsRoundTrip) {
  for (const auto& [tokens, features] :
       {std::pair<int64_t, int64_t>{0, 0}, {0, 9}, {9, 0}, {1, 1}, {1, 6}, {63, 1}, {65, 66}}) {
    const Tensor x = drawn({tokens, features}, 21, DType::bf16);
    for (const Along24 along : {Along24::features, Along24::tokens}) {
      const Sparse24 made = compress24(x, along);
      validate_elements(made, "test");
      // Within a group of at most two elements nothing is dropped.
      const Tensor y = decompress24(made);
      EXPECT_EQ(y.shape(), x.shape());
      EXPECT_EQ(decompress24(compress24(y, along)).to_vector<float>(), y.to_vector<float>());
      if ((along == Along24::features ? features : tokens) <= 2) {
        EXPECT_EQ(y.to_vector<float>(), x.to_vector<float>());
      }
    }
  }
  const Sparse24 large = Sparse24::empty(128, 256, Along24::features, DType::bf16, Device::cpu());
  EXPECT_EQ(double(large.bytes()) / (128 * 256), 1.125);
}

TEST(Sparse24, PaddingIsZerosAtTheFirstTwoPositions) {
  Rng rng(3);
  const Tensor x = Tensor::full({5, 9}, 1, DType::f32, Device::cpu());
  for (const Selection24& selection : {Selection24{}, Selection24::mvue(rng, Device::cpu())})
    for (const Along24 along : {Along24::features, Along24::tokens}) {
      const Sparse24 made = compress24(x, along, selection);
      const auto words = made.metadata.to_vector<int32_t>();
      const auto values = made.values.to_vector<float>();
      for (int row = 0; row < 64; ++row)
        for (int group = 0; group < 16; ++group) {
          if (row < made.m() && group * 4 < made.k()) continue;
          EXPECT_EQ(uint32_t(words[size_t(word_index(0, row, group))]) >> word_bit(row, group) & 0xF, 4u);
          EXPECT_EQ(values[size_t(value_index(0, row, group))], 0);
          EXPECT_EQ(values[size_t(value_index(0, row, group)) + 1], 0);
        }
    }
}

/// What a warpgroup would compute, thread by thread, from PTX ISA's description of wgmma.mma_async.sp
/// (m64nNk32, A in registers) and not from sparse24_layout.h: A fragment and metadata are loaded as the
/// kernels load them.
TEST(Sparse24, TheFragmentsAreThoseOfTheInstruction) {
  constexpr int64_t kM = 128, kK = 192, kTilesOfK = 3;
  const Tensor x = drawn({kM, kK}, 31, DType::bf16);
  const Sparse24 made = compress24(x, Along24::features);
  const auto values = made.values.to_vector<float>();
  const auto metadata = made.metadata.to_vector<int32_t>();
  const auto expected = decompress24(made).to_vector<float>();
  std::vector<float> a(size_t(kM * kK), 0);
  int64_t found = 0;
  for (int64_t tile = 0; tile < kM / 64 * kTilesOfK; ++tile)
    for (int step = 0; step < 2; ++step)
      for (int thread = 0; thread < 128; ++thread) {
        const int warp = thread / 32, g = thread % 32 / 4, c = thread % 4;
        for (int word = 0; word < 4; ++word) {
          // a0: row g, k 4c ...; a1: row g + 8; a2: row g, k 16 + 4c ...; a3: row g + 8.
          const int row = 16 * warp + g + (word & 1) * 8, half = word / 2;
          // The metadata of k 0 ... 15 (16 ... 31) of the step with selector s comes from lane 2 s (2 s + 1)
          // of the quad, that of row g + 8 from its upper half.
          const int lane = warp * 32 + g * 4 + 2 * step + half;
          const uint32_t bits = uint32_t(metadata[size_t(tile * 128 + lane)]) >> ((word & 1) * 16 + 4 * c);
          const int first = int(bits & 3), second = int(bits >> 2 & 3);
          ASSERT_LT(first, second);
          const int64_t at =
              ((tile / kTilesOfK) * 64 + row) * kK + tile % kTilesOfK * 64 + step * 32 + half * 16 + c * 4;
          const size_t from = size_t(((tile * 2 + step) * 128 + thread) * 8 + word * 2);
          a[size_t(at + first)] = values[from], a[size_t(at + second)] = values[from + 1];
          found += 2;
        }
      }
  EXPECT_EQ(found, kM * kK / 2);
  EXPECT_EQ(a, expected);
}

/// Every place of a tile occurs once.
TEST(Sparse24, TheLayoutIsAPermutation) {
  std::vector<int> values(kTileValues, 0), bits(size_t(kTileWords) * 32, 0);
  for (int row = 0; row < kTileRows; ++row)
    for (int group = 0; group < kTileGroups; ++group) {
      const int64_t value = value_index(0, row, group);
      ++values[size_t(value)], ++values[size_t(value) + 1];
      for (int bit = 0; bit < 4; ++bit)
        ++bits[size_t(word_index(0, row, group) * 32 + word_bit(row, group) + bit)];
      EXPECT_EQ(value_index(3, row, group), value + 3 * kTileValues);
      EXPECT_EQ(word_index(3, row, group), word_index(0, row, group) + 3 * kTileWords);
    }
  EXPECT_EQ(std::count(values.begin(), values.end(), 1), kTileValues);
  EXPECT_EQ(std::count(bits.begin(), bits.end(), 1), kTileWords * 32);
}

// ---- GEMM ----

/// Small integers: every sum is exact, so a masked dense product is the only right answer, bit for bit.
TEST(Sparse24, TheProductIsThatOfTheMaskedMatrix) {
  for (const DType dtype : {DType::f64, DType::f32, DType::bf16, DType::f16})
    for (const Along24 along : {Along24::features, Along24::tokens})
      for (const bool transposed : {false, true})
        for (const bool by_m : {false, true}) {
          const Tensor x = small_numbers({37, 46}, 1).to(dtype);
          const Sparse24 a = compress24(x, along);
          const int64_t m = a.m(), k = a.k(), n = 19;
          const Tensor b = small_numbers({k, n}, 2).to(dtype),
                       bias = small_numbers(by_m ? Shape{m, 1} : Shape{n}, 3).to(dtype),
                       residual = small_numbers({m, n}, 4).to(dtype);
          const Tensor masked = decompress24(a),
                       left = along == Along24::features ? masked : masked.transpose(0, 1);
          const Tensor memory = Tensor::empty(transposed ? Shape{n, m} : Shape{m, n}, dtype, Device::cpu());
          const Tensor d = transposed ? memory.transpose(0, 1) : memory;
          multiply24(d, a, b, {.alpha = 2, .bias = bias, .residual = residual});
          const auto l = left.to_vector<double>(), r = b.to_vector<double>(), add = bias.to_vector<double>(),
                     more = residual.to_vector<double>(), y = d.to_vector<double>();
          for (int64_t row = 0; row < m; ++row)
            for (int64_t column = 0; column < n; ++column) {
              double sum = 0;
              for (int64_t i = 0; i < k; ++i) sum += l[size_t(row * k + i)] * r[size_t(i * n + column)];
              const double expected =
                  2 * sum + add[size_t(by_m ? row : column)] + more[size_t(row * n + column)];
              ASSERT_EQ(y[size_t(row * n + column)], expected) << dtype << " " << row << " " << column;
            }
          multiply24(d, a, b, {.alpha = -2, .accumulate = true});
          const auto rest = d.to_vector<double>();
          for (int64_t i = 0; i < m * n; ++i)
            ASSERT_EQ(rest[size_t(i)], add[size_t(by_m ? i / n : i % n)] + more[size_t(i)]);
        }
}

TEST(Sparse24, AWideResultIsRoundedOnce) {
  const Tensor x = drawn({12, 64}, 1, DType::bf16), b = drawn({64, 9}, 2, DType::bf16);
  const Sparse24 a = compress24(x, Along24::features);
  const Tensor wide = Tensor::empty({12, 9}, DType::f32, Device::cpu()),
               narrow = Tensor::empty({12, 9}, DType::bf16, Device::cpu());
  multiply24(wide, a, b);
  multiply24(narrow, a, b);
  EXPECT_EQ(wide.to(DType::bf16).to_vector<float>(), narrow.to_vector<float>());
  EXPECT_NE(wide.to_vector<float>(), narrow.to_vector<float>());
}

TEST(Sparse24, AnEmptySumLeavesWhatIsAdded) {
  const Sparse24 a = compress24(Tensor::empty({3, 0}, DType::f32, Device::cpu()), Along24::features);
  const Tensor b = Tensor::empty({0, 2}, DType::f32, Device::cpu()),
               d = Tensor::full({3, 2}, 7, DType::f32, Device::cpu());
  multiply24(d, a, b, {.accumulate = true});
  EXPECT_EQ(d.to_vector<float>(), std::vector<float>(6, 7));
  multiply24(d, a, b, {.bias = Tensor::from(std::vector<float>{1, 2}, {2})});
  EXPECT_EQ(d.to_vector<float>(), (std::vector<float>{1, 2, 1, 2, 1, 2}));
  multiply24(d, a, b);
  EXPECT_EQ(d.to_vector<float>(), std::vector<float>(6, 0));
}

TEST(Sparse24, ALinearLayerKeepsWhatItMultiplied) {
  Tensor x = drawn({6, 8}, 1, DType::f32), weight = drawn({3, 8}, 2, DType::f32);
  require_grad(x), require_grad(weight);
  Tape tape;
  const Tensor y = sparse24_linear(x, weight);
  x.fill(0);  // x itself is not saved
  tape.backward(std::vector{y}, std::vector{Tensor::full({6, 3}, 1, DType::f32, Device::cpu())});
  EXPECT_NE(grad(weight).to_vector<float>(), std::vector<float>(24, 0));
  const auto dx = grad(x).to_vector<float>();
  EXPECT_EQ(std::count(dx.begin(), dx.end(), 0.0f), 24);
}

// ---- on the way to a GPU ----

TEST(Sparse24, OperandsAreDescribedAsTheKernelsTakeThem) {
  const Device cpu = Device::cpu();
  const Sparse24 a = compress24(drawn({40, 72}, 1, DType::bf16), Along24::features);
  const auto described = [&](const Tensor& d, const Tensor& b, const Multiply24Options& options = {}) {
    return describe24({d, a, b, options});
  };
  const Tensor d = Tensor::empty({40, 24}, DType::bf16, cpu), b = Tensor::empty({72, 24}, DType::bf16, cpu),
               rows = Tensor::empty({24, 72}, DType::bf16, cpu);
  const SparseGemm24 plain = described(d, b).gemm;
  EXPECT_EQ(std::vector<int64_t>({plain.m, plain.n, plain.k}), std::vector<int64_t>({40, 24, 72}));
  EXPECT_FALSE(plain.b_k_major || plain.transposed || plain.by_threads || plain.wide || plain.accumulate);
  EXPECT_EQ(plain.ldb, b.layout().stride(0));
  EXPECT_EQ(plain.ldd, d.layout().stride(0));
  const SparseGemm24 k_major = described(d, rows.transpose(0, 1)).gemm;
  EXPECT_TRUE(k_major.b_k_major);
  EXPECT_EQ(k_major.ldb, rows.layout().stride(0));
  const Tensor transposed = Tensor::empty({24, 40}, DType::f32, cpu);
  const SparseGemm24 across = described(transposed.transpose(0, 1), b, {.accumulate = true}).gemm;
  EXPECT_TRUE(across.transposed && across.wide && across.accumulate && !across.by_threads);
  EXPECT_EQ(across.ldd, transposed.layout().stride(0));
  // A bias along m or n, a residual that d becomes first.
  const Tensor by_m = Tensor::empty({40, 1}, DType::bf16, cpu), by_n = Tensor::empty({24}, DType::bf16, cpu);
  const SparseGemm24 biased = described(d, b, {.bias = by_m, .residual = d}).gemm;
  EXPECT_EQ(biased.bias_m, by_m.raw());
  EXPECT_EQ(biased.bias_n, nullptr);
  EXPECT_TRUE(biased.accumulate);
  EXPECT_EQ(described(d, b, {.bias = by_n}).gemm.bias_n, by_n.raw());
  // TMA writes whole 16 bytes of rows that start on 16 bytes: padding of d's own may be overwritten,
  // neighbours may not.
  const Tensor odd = Tensor::empty({40, 21}, DType::bf16, cpu),
               wide = Tensor::empty({40, 48}, DType::bf16, cpu);
  const Tensor odd_b = Tensor::empty({72, 21}, DType::bf16, cpu);
  EXPECT_FALSE(described(odd, odd_b).gemm.by_threads);
  EXPECT_TRUE(described(wide.slice(1, 0, 21), odd_b).gemm.by_threads);
  EXPECT_TRUE(described(wide.slice(1, 1, 25), b).gemm.by_threads);
  EXPECT_FALSE(described(wide.slice(1, 8, 32), b).gemm.by_threads);
  EXPECT_STREQ(described(d, b).lacks, "");
  EXPECT_STREQ(described(d, Tensor::empty({72, 48}, DType::bf16, cpu).slice(1, 1, 25)).lacks,
               "b whose rows start on 16-byte boundaries");
  EXPECT_STREQ(described(d, Tensor::empty({72, 48}, DType::bf16, cpu).slice(1, 0, 48, 2)).lacks,
               "b with dense rows or columns");
  EXPECT_EQ(multiply24_lacks(d, a, b), "a GPU of compute capability 9.0");
  EXPECT_EQ(multiply24_variant(d, a, b), "cpu");
}

TEST(Sparse24, TheModelTakesLargeTilesWhereTheyFillTheGpu) {
  const DeviceInfo info{.name = "NVIDIA H200", .major = 9, .minor = 0, .multiprocessors = 132};
  const Gpu gpu(info, 132);
  const auto chosen = [&](int64_t m, int64_t n, int64_t k) {
    return choose24({.m = m, .n = n, .k = k}, gpu);
  };
  const Choice24 large = chosen(8192, 8192, 8192), longer = chosen(8192, 8192, 16384);
  EXPECT_EQ(kTiles24[large.tile].rows * kTiles24[large.tile].columns, 128 * 256);
  EXPECT_NEAR(longer.seconds / large.seconds, 2, 0.1);
  const Choice24 small = chosen(128, 128, 4096);
  EXPECT_EQ(kTiles24[small.tile].rows * kTiles24[small.tile].columns, 128 * 128);
  // What was measured, within what the page says of the model (docs/ops/sparse24.md): m, n, k, PFLOP/s
  // counted dense.
  for (const auto& [m, n, k, rate] : {std::tuple{4096, 8192, 4096, 1.068},
                                      {14336, 8192, 4096, 0.990},
                                      {16384, 16384, 4096, 0.974},
                                      {8192, 8192, 8192, 1.038},
                                      {4096, 16384, 16384, 1.047},
                                      {8192, 16384, 2048, 0.940},
                                      {2048, 16384, 8192, 1.136}}) {
    const double modelled = 2e-15 * m * n * k / chosen(m, n, k).seconds;
    EXPECT_NEAR(modelled / rate, 1, 0.09) << m << " x " << n << " x " << k;
    EXPECT_GT(decompressed24_seconds({.m = m, .n = n, .k = k}, gpu), chosen(m, n, k).seconds);
  }
}

// ---- errors ----

TEST(Sparse24, BadInputsSayWhatIsExpected) {
  const Tensor x = drawn({8, 8}, 1, DType::f32);
  expect_error([&] { compress24(Tensor(), Along24::features); },
               {"compress24", "undefined", "[tokens, features]"});
  expect_error([&] { compress24(x.reshape({64}), Along24::features); }, {"compress24", "f32[64]"});
  expect_error([&] { compress24(x.to(DType::i32), Along24::features); }, {"i32[8, 8]", "bf16 or f16"});
  expect_error([&] { compress24(x, Along24::features, {.method = Method24::soft_dynamic}); },
               {"soft_dynamic", "no scale", "soft_scale"});
  expect_error([&] { compress24(x, Along24::features, {.method = Method24::soft_threshold, .scale = x}); },
               {"the scale is f32[8, 8]", "f32 [1]"});
  expect_error([&] { parse_method24("top2"); }, {"\"top2\"", "naive, mvue"});
  expect_error([&] { parse_along24("rows"); }, {"\"rows\"", "features or tokens"});
  expect_error([&] { soft_scale(x, Along24::features, -1); }, {"-1 samples"});
  expect_error([&] { DynamicScale24{.interval = 0}.next(x); }, {"an interval of 0"});
  expect_error([&] { decompress24(Sparse24{}); }, {"decompress24", "undefined"});
  const Sparse24 a = compress24(x, Along24::features);
  expect_error([&] { compress24_like(drawn({8, 4}, 1, DType::f32), a); }, {"compress24_like", "[8, 8]"});
  const Tensor d = Tensor::empty({8, 3}, DType::f32, Device::cpu()),
               b = Tensor::zeros({8, 3}, DType::f32, Device::cpu());
  expect_error([&] { multiply24(d, a, b.to(DType::f64)); }, {"b is f64[8, 3]", "f32[8, n]"});
  expect_error([&] { multiply24(d, a, Tensor::zeros({7, 3}, DType::f32, Device::cpu())); }, {"f32[7, 3]"});
  expect_error([&] { multiply24(x, a, b); }, {"d is f32[8, 8]", "[8, 3]"});
  expect_error([&] { multiply24(d.to(DType::bf16), a, b); }, {"d is bf16[8, 3]"});
  expect_error([&] { multiply24(d, a, b, {.accumulate = true, .bias = b}); }, {"a bias and accumulate"});
  expect_error([&] { multiply24(d, a, b, {.accumulate = true, .residual = b}); },
               {"a residual and accumulate"});
  expect_error([&] { multiply24(d, a, b, {.bias = b}); }, {"bias is f32[8, 3]", "[3] or [8, 1]"});
  expect_error([&] { multiply24(d, a, b, {.residual = x}); }, {"residual is f32[8, 8]"});
  Sparse24 bad = a;
  bad.metadata = a.metadata.clone();
  bad.metadata.data<int32_t>()[5] = 0x44444401;
  expect_error([&] { validate_elements(bad, "layer 3"); }, {"layer 3", "positions 1 and 0", "ascend"});
  bad = a;
  bad.values = a.values.clone();
  bad.values.data<float>()[2047] = 1;
  expect_error([&] { validate_elements(bad, "layer 3"); }, {"layer 3", "outside the matrix [8, 8]"});
  bad.features = 9, bad.values = Tensor::zeros({1, 2, 2048}, DType::f32, Device::cpu());
  expect_error([&] { validate(bad, "layer 3"); }, {"layer 3", "values are f32[1, 2, 2048]", "[1, 1, 2048]"});
}

}  // namespace
}  // namespace tessera::ops
