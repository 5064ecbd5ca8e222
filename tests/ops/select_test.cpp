#include "ops/select/select.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <functional>
#include <numeric>
#include <optional>

#include "ops/random/random.h"
#include "ops/select/select_math.h"
#include "ops/variant.h"
#include "runtime/capture.h"
#include "tests/errors.h"
#include "tests/ops/guarded.h"
#include "tests/ops/tensors.h"

namespace tessera::ops {
namespace {

using Rows = std::vector<int32_t>;

Tensor norms_of(const std::vector<float>& values) {
  return Tensor::from(values, {int64_t(values.size())});
}
Tensor number(int32_t value, Device device = Device::cpu()) {
  return Tensor::from(std::vector<int32_t>{value}, {1}).to(device);
}

/// The rows that are chosen, without padding. The padding must be what the contract says.
Rows rows_of(const Selection& chosen) {
  Rows rows = chosen.indices.to_vector<int32_t>();
  const auto scales = chosen.scales.to_vector<float>();
  const auto count = size_t(chosen.count.item<int32_t>());
  EXPECT_LE(count, rows.size());
  for (size_t n = count; n < rows.size(); ++n) {
    EXPECT_EQ(rows[n], chosen.rows) << n;
    EXPECT_EQ(scales[n], 0.0f) << n;
  }
  rows.resize(count);
  for (size_t n = 1; n < count; ++n) EXPECT_LT(rows[n - 1], rows[n]);
  return rows;
}

/// M norms, log-normal: a few are many times larger than most.
std::vector<float> random_norms(int64_t rows, uint64_t seed, double width = 1) {
  Rng rng(seed);
  const Tensor x = Tensor::empty({rows}, DType::f32, Device::cpu());
  fill_normal(x, 0, width, rng);
  std::vector<float> norms = x.to_vector<float>();
  for (float& norm : norms) norm = std::exp(norm);
  return norms;
}

// ---- which rows ----

TEST(Select, FirstIsARange) {
  const Selection chosen = Selection::first(5, 3, Device::cpu());
  EXPECT_EQ(rows_of(chosen), (Rows{0, 1, 2}));
  EXPECT_EQ(chosen.scales.to_vector<float>(), (std::vector<float>{1, 1, 1}));
  EXPECT_EQ(chosen.rows, 5);
}

TEST(Select, TopNormTakesTheLargestInIndexOrderAndOfTiesTheFirst) {
  const Tensor norms = norms_of({2, 5, 1, 5, 3, 5, 2});
  EXPECT_EQ(rows_of(Selection::top_norm(norms, 0)), Rows{});
  EXPECT_EQ(rows_of(Selection::top_norm(norms, 1)), (Rows{1}));
  EXPECT_EQ(rows_of(Selection::top_norm(norms, 2)), (Rows{1, 3}));
  EXPECT_EQ(rows_of(Selection::top_norm(norms, 4)), (Rows{1, 3, 4, 5}));
  EXPECT_EQ(rows_of(Selection::top_norm(norms, 5)), (Rows{0, 1, 3, 4, 5}));
  EXPECT_EQ(rows_of(Selection::top_norm(norms, 7)), (Rows{0, 1, 2, 3, 4, 5, 6}));
  // Norms that only their last bit tells apart.
  const float one = std::nextafter(1.0f, 2.0f), two = std::nextafter(one, 2.0f);
  EXPECT_EQ(rows_of(Selection::top_norm(norms_of({1, one, 1, one, two}), 2)), (Rows{1, 4}));
  EXPECT_EQ(rows_of(Selection::top_norm(norms_of({1, one, 1, one, two}), 4)), (Rows{0, 1, 3, 4}));
}

TEST(Select, TopNormOrdersZerosInfinitiesAndNan) {
  const Tensor norms = norms_of({-0.0f, kInfF, 0.0f, -kNanF, 1e-45f, -1.0f, kNanF, -kInfF});
  EXPECT_EQ(rows_of(Selection::top_norm(norms, 1)), (Rows{3}));
  EXPECT_EQ(rows_of(Selection::top_norm(norms, 3)), (Rows{1, 3, 6}));
  EXPECT_EQ(rows_of(Selection::top_norm(norms, 4)), (Rows{1, 3, 4, 6}));
  EXPECT_EQ(rows_of(Selection::top_norm(norms, 5)), (Rows{0, 1, 3, 4, 6}));
  EXPECT_EQ(rows_of(Selection::top_norm(norms, 7)), (Rows{0, 1, 2, 3, 4, 5, 6}));
}

TEST(Select, TopNormAgreesWithAStableSort) {
  for (const int64_t rows : {1, 2, 100, 999})
    for (const DType dtype : {DType::f32, DType::bf16}) {  // of 16 bits: many ties
      const Tensor norms = norms_of(random_norms(rows, uint64_t(rows))).to(dtype);
      const auto values = norms.to(DType::f32).to_vector<float>();
      for (const int64_t n : {int64_t{0}, int64_t{1}, rows / 3, rows - 1, rows}) {
        Rows order(static_cast<size_t>(rows));
        std::iota(order.begin(), order.end(), 0);
        std::ranges::stable_sort(order, std::greater{}, [&](int32_t i) { return values[size_t(i)]; });
        order.resize(size_t(n));
        std::ranges::sort(order);
        EXPECT_EQ(rows_of(Selection::top_norm(norms, n)), order) << rows << " " << dtype << " " << n;
      }
    }
}

TEST(Select, ThresholdTakesEqualNormsAndNan) {
  const Tensor norms = norms_of({0.5f, kNanF, 1.0f, 2.0f, 0.0f, kInfF, -0.0f, -3.0f});
  EXPECT_EQ(rows_of(Selection::threshold(norms, 1)), (Rows{1, 2, 3, 5}));
  EXPECT_EQ(rows_of(Selection::threshold(norms, 0)), (Rows{0, 1, 2, 3, 4, 5, 6}));
  EXPECT_EQ(rows_of(Selection::threshold(norms, -kInfF)).size(), 8u);
  EXPECT_EQ(rows_of(Selection::threshold(norms, kInfF)), (Rows{1, 5}));
  EXPECT_EQ(Selection::threshold(norms, 1).capacity(), 8);
}

TEST(Select, RandomTakesTheLargestKeysOfOneStream) {
  Rng rng(5);
  rng.reserve(Device::cpu());  // the second stream
  const Selection chosen = Selection::random(1003, 100, rng, Device::cpu());
  std::vector<std::pair<uint32_t, int32_t>> keys;
  for (int32_t i = 0; i < 1003; ++i) keys.emplace_back(~philox(5, 1, uint64_t(i / 4)).word[i % 4], i);
  std::ranges::sort(keys);
  Rows expected;
  for (size_t n = 0; n < 100; ++n) expected.push_back(keys[n].second);
  std::ranges::sort(expected);
  EXPECT_EQ(rows_of(chosen), expected);
  for (const float scale : chosen.scales.to_vector<float>()) EXPECT_EQ(scale, float(1003.0 / 100.0));
  EXPECT_EQ(rng.state().offset, 2u);
}

TEST(Select, NothingToChooseFromAndNothingToChoose) {
  Rng rng(1);
  const Tensor none = norms_of({}), some = norms_of({1, 2});
  for (const Tensor& norms : {none, some}) {
    const int64_t rows = norms.count();
    for (const Selection& chosen :
         {Selection::first(rows, 0, Device::cpu()), Selection::top_norm(norms, 0),
          Selection::random(rows, 0, rng, Device::cpu()), Selection::importance(norms, 0, rng)}) {
      EXPECT_EQ(rows_of(chosen), Rows{});
      EXPECT_EQ(chosen.capacity(), 0);
    }
  }
  EXPECT_EQ(rows_of(Selection::threshold(none, 0)), Rows{});
}

TEST(Select, CountsOnTheDeviceReplaceThoseOfTheHost) {
  const Tensor norms = norms_of({1, 9, 2, 8, 3, 7, 4, 6});
  const auto top = [&](int32_t n, int32_t rows) {
    return rows_of(Selection::top_norm(norms, 5, {.n = number(n), .rows = number(rows)}));
  };
  EXPECT_EQ(top(2, 8), (Rows{1, 3}));
  EXPECT_EQ(top(100, 8), (Rows{1, 3, 5, 6, 7}));  // at most the capacity
  EXPECT_EQ(top(3, 3), (Rows{0, 1, 2}));
  EXPECT_EQ(top(5, 2), (Rows{0, 1}));  // at most the rows
  EXPECT_EQ(top(-1, 8), Rows{});
  EXPECT_EQ(top(2, -7), Rows{});
  EXPECT_EQ(top(2, 1000), (Rows{1, 3}));
  EXPECT_EQ(rows_of(Selection::first(8, 5, Device::cpu(), {.rows = number(2)})), (Rows{0, 1}));
  EXPECT_EQ(rows_of(Selection::threshold(norms, 3, {.rows = number(5)})), (Rows{1, 3, 4}));
  Rng rng(3);
  const Selection random = Selection::random(8, 5, rng, Device::cpu(), {.n = number(2), .rows = number(3)});
  EXPECT_EQ(rows_of(random).size(), 2u);
  EXPECT_LT(rows_of(random).back(), 3);
  EXPECT_EQ(random.scales.to_vector<float>()[0], 1.5f);
  for (int draw = 0; draw < 20; ++draw) {
    const Rows rows = rows_of(Selection::importance(norms, 5, rng, {.n = number(3), .rows = number(4)}));
    EXPECT_EQ(rows.size(), 3u);
    EXPECT_LT(rows.back(), 4);
  }
}

// ---- importance ----

/// Probabilities by another road: sorted weights, the largest taken for certain until the rest needs no cut.
std::vector<double> probabilities(const std::vector<float>& norms, int64_t n) {
  const float largest = *std::ranges::max_element(norms);
  std::vector<size_t> order(norms.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::ranges::stable_sort(order, std::greater{}, [&](size_t i) { return norms[i]; });
  double rest = 0;
  for (const float norm : norms) rest += double(norm) / double(largest);
  std::vector<double> p(norms.size(), 1.0);
  for (size_t taken = 0; taken < order.size(); ++taken) {
    const double next = double(norms[order[taken]]) / double(largest);
    if (next * double(n - int64_t(taken)) <= rest) {
      for (size_t i = taken; i < order.size(); ++i)
        p[order[i]] = double(norms[order[i]]) / double(largest) * double(n - int64_t(taken)) / rest;
      break;
    }
    rest -= next;
  }
  return p;
}

TEST(SelectImportance, ScalesAreTheInverseProbabilitiesAndTheCountIsExact) {
  Rng rng(11);
  for (const double width :
       {0.1, 0.5, 1.0})  // the largest norm is at most 256 times the least: exact weights
    for (const int64_t rows : {2, 7, 100, 1001})
      for (const int64_t n : {int64_t{1}, rows / 10 + 1, rows / 2, rows - 1, rows}) {
        std::vector<float> norms = random_norms(rows, uint64_t(rows), width);
        for (float& norm : norms) norm = std::clamp(norm, 0.1f, 12.0f);
        const auto p = probabilities(norms, n);
        EXPECT_NEAR(std::accumulate(p.begin(), p.end(), 0.0), double(n), 1e-9);
        const Selection chosen = Selection::importance(norms_of(norms), n, rng);
        const Rows at = rows_of(chosen);
        const auto scales = chosen.scales.to_vector<float>();
        ASSERT_EQ(at.size(), size_t(n)) << rows;
        for (size_t k = 0; k < at.size(); ++k)
          EXPECT_NEAR(double(scales[k]) * p[size_t(at[k])], 1, 1e-6) << rows << " " << n << " " << at[k];
      }
}

TEST(SelectImportance, EveryOffsetDrawsEachRowInExactProportion) {
  // All random numbers there are, on weights small enough to try them all: row i is drawn by picks * w_i of
  // the `total` offsets, so the mean of taken / p over all draws is exactly 1.
  const std::vector<std::vector<uint32_t>> lines{
      {1, 2, 3, 4, 5}, {7, 7, 7}, {1, 1, 1, 1, 30}, {5, 0, 3, 0, 0, 9}};
  for (const auto& weights : lines) {
    const uint64_t total = std::accumulate(weights.begin(), weights.end(), uint64_t{0});
    const uint32_t largest = *std::ranges::max_element(weights);
    for (uint32_t picks = 1; uint64_t(picks) * largest <= total; ++picks) {
      Cut cut{.bar = largest, .weighted = 1, .picks = picks, .limit = picks, .total = total};
      cut.density = double(picks) / double(total);
      std::vector<uint64_t> drawn(weights.size(), 0);
      for (cut.offset = 0; cut.offset < total; ++cut.offset) {
        uint64_t place = 0;
        uint32_t taken = 0;
        for (size_t i = 0; i < weights.size(); ++i) {
          const uint64_t drawable = cut.term(weights[i]).drawable;
          const uint32_t here = cut.points_before(place + drawable) - cut.points_before(place);
          ASSERT_LE(here, 1u);
          drawn[i] += here, taken += here, place += drawable;
        }
        ASSERT_EQ(taken, picks);
      }
      for (size_t i = 0; i < weights.size(); ++i) EXPECT_EQ(drawn[i], uint64_t(picks) * weights[i]) << i;
    }
  }
}

TEST(SelectImportance, PointsOfTheLargestSumsAreExact) {
  // 94-bit products; the estimate in double is corrected.
  const uint64_t total = (uint64_t{1} << 62) + 12345;
  for (const uint32_t picks : {1u, 3u, 1000003u, 2147483646u})
    for (const uint64_t offset : {uint64_t{0}, total / 3, total - 1}) {
      Cut cut{.bar = 1, .weighted = 1, .picks = picks, .limit = picks, .total = total, .offset = offset};
      cut.density = double(picks) / double(total);
      for (const uint64_t k : {uint64_t{0}, uint64_t{picks / 2}, uint64_t{picks - 1}}) {
        // The first whole place beyond point k.
        const auto place = uint64_t((static_cast<unsigned __int128>(k) * total + offset) / picks) + 1;
        EXPECT_EQ(cut.points_before(place), k + 1) << picks << " " << k;
        EXPECT_EQ(cut.points_before(place - 1), k) << picks << " " << k;
      }
      EXPECT_EQ(cut.points_before(total), picks);
      EXPECT_EQ(cut.points_before(0), 0u);
    }
}

TEST(SelectImportance, NanAndInfinityAreCertain) {
  std::vector<float> norms(50, 1.0f);
  norms[7] = kNanF, norms[20] = kInfF, norms[49] = -kNanF;
  Rng rng(2);
  for (int draw = 0; draw < 50; ++draw) {
    const Selection chosen = Selection::importance(norms_of(norms), 5, rng);
    const Rows rows = rows_of(chosen);
    ASSERT_EQ(rows.size(), 5u);
    const auto scales = chosen.scales.to_vector<float>();
    for (const int32_t certain : {7, 20, 49}) {
      const auto found = std::ranges::find(rows, certain);
      ASSERT_NE(found, rows.end());
      EXPECT_EQ(scales[size_t(found - rows.begin())], 1.0f);
    }
    EXPECT_EQ(std::ranges::count(scales, 47.0f / 2), 2);  // two of the other 47
  }
  EXPECT_EQ(rows_of(Selection::importance(norms_of(norms), 2, rng)),
            (Rows{7, 20}));  // fewer than certain ones
  EXPECT_EQ(rows_of(Selection::importance(norms_of(norms), 3, rng)), (Rows{7, 20, 49}));
}

TEST(SelectImportance, ZeroRowsAreTakenOnlyWhenNoOthersAreLeft) {
  std::vector<float> norms(40, 0.0f);
  norms[3] = 1, norms[30] = 1e-30f, norms[31] = -0.0f, norms[32] = -5;
  Rng rng(4);
  for (int draw = 0; draw < 50; ++draw) {
    EXPECT_EQ(rows_of(Selection::importance(norms_of(norms), 2, rng)), (Rows{3, 30}));
    const Selection more = Selection::importance(norms_of(norms), 6, rng);
    const Rows rows = rows_of(more);
    ASSERT_EQ(rows.size(), 6u);
    EXPECT_TRUE(std::ranges::binary_search(rows, 3) && std::ranges::binary_search(rows, 30));
    EXPECT_EQ(std::ranges::count(more.scales.to_vector<float>(), 38.0f / 4), 4);
  }
  EXPECT_EQ(rows_of(Selection::importance(norms_of(norms), 40, rng)).size(), 40u);
}

TEST(SelectImportance, TinyNormsKeepAChance) {
  // 2^-60 of the largest is less than one unit, and counts as one.
  EXPECT_EQ(norm_weight(0x1p-60f, norm_exponent(1.0f)), 1u);
  EXPECT_EQ(norm_weight(1.0f, norm_exponent(1.0f)), 0x80000000u);
  EXPECT_EQ(norm_weight(std::nextafter(2.0f, 0.0f), norm_exponent(1.0f)), 0xFFFFFF00u);
  EXPECT_EQ(norm_weight(0x1p-31f, norm_exponent(1.0f)), 1u);
  EXPECT_EQ(norm_weight(0x1.8p-30f, norm_exponent(1.0f)), 3u);
  // Subnormal norms alone are ordinary weights.
  EXPECT_EQ(norm_weight(0x1p-149f, norm_exponent(0x1p-127f)), 1u << 8);
  EXPECT_EQ(norm_weight(0x1p-126f, norm_exponent(0x1p-126f)), 0x80000000u);
  EXPECT_EQ(norm_weight(0.0f, 200), 0u);
  EXPECT_EQ(norm_weight(-1.0f, 200), 0u);
  EXPECT_EQ(norm_weight(kInfF, 200), kCertain);
}

// ---- frequencies; fixed seeds, so each of these either always passes or never ----

/// How often each row is chosen by `draws` calls.
std::vector<int64_t> frequencies(int64_t rows, int64_t draws, const std::function<Selection()>& choose) {
  std::vector<int64_t> chosen(size_t(rows), 0);
  for (int64_t draw = 0; draw < draws; ++draw) {
    const Selection selection = choose();
    for (const int32_t row : rows_of(selection)) ++chosen[size_t(row)];
  }
  return chosen;
}

/// Independent draws of probability p: 5 standard deviations, which one of 1.7 million rows exceeds.
void expect_frequency(int64_t count, int64_t draws, double p, const std::string& what) {
  EXPECT_NEAR(double(count), p * double(draws), 5 * std::sqrt(double(draws) * p * (1 - p)) + 1e-9) << what;
}

constexpr int64_t kDraws = 20000;

TEST(SelectFrequencies, RandomTakesEveryRowAndPairAlike) {
  constexpr int64_t kRows = 23, kN = 7;
  Rng rng(101);
  std::vector<int64_t> pairs(kRows * kRows, 0);
  const auto counts = frequencies(kRows, kDraws, [&] {
    const Selection chosen = Selection::random(kRows, kN, rng, Device::cpu());
    const Rows rows = rows_of(chosen);
    EXPECT_EQ(rows.size(), size_t(kN));
    for (const int32_t a : rows)
      for (const int32_t b : rows) ++pairs[size_t(a * kRows + b)];
    return chosen;
  });
  for (int64_t i = 0; i < kRows; ++i) {
    expect_frequency(counts[size_t(i)], kDraws, double(kN) / kRows, "row " + std::to_string(i));
    for (int64_t j = 0; j < i; ++j)
      expect_frequency(pairs[size_t(i * kRows + j)], kDraws, double(kN * (kN - 1)) / (kRows * (kRows - 1)),
                       "rows " + std::to_string(i) + ", " + std::to_string(j));
  }
}

TEST(SelectFrequencies, ImportanceFollowsItsProbabilities) {
  std::vector<float> norms = random_norms(31, 8, 0.8);
  norms[4] = 40;  // certain
  const auto p = probabilities(norms, 9);
  EXPECT_EQ(p[4], 1.0);
  Rng rng(102);
  const auto counts = frequencies(31, kDraws, [&] { return Selection::importance(norms_of(norms), 9, rng); });
  for (size_t i = 0; i < p.size(); ++i) expect_frequency(counts[i], kDraws, p[i], "row " + std::to_string(i));
}

TEST(SelectFrequencies, ScaledSumsAreUnbiased) {
  constexpr int64_t kRows = 40, kWidth = 3, kN = 10;
  Rng values(7);
  const Tensor x = Tensor::empty({kRows, kWidth}, DType::f64, Device::cpu());
  fill_normal(x, 0.5, 2, values);
  const Tensor norms = row_norms(x);
  const auto elements = x.to_vector<double>();
  for (const bool random : {false, true}) {
    Rng rng(103);
    std::vector<double> sums(kWidth, 0), squares(kWidth, 0), dense(kWidth, 0);
    for (size_t i = 0; i < elements.size(); ++i) dense[i % kWidth] += elements[i];
    for (int64_t draw = 0; draw < kDraws; ++draw) {
      const Selection chosen =
          random ? Selection::random(kRows, kN, rng, Device::cpu()) : Selection::importance(norms, kN, rng);
      const auto rows = gather_selected(x, chosen, RowScale::selection).to_vector<double>();
      for (int64_t c = 0; c < kWidth; ++c) {
        double sum = 0;
        for (int64_t n = 0; n < kN; ++n) sum += rows[size_t(n * kWidth + c)];
        sums[size_t(c)] += sum, squares[size_t(c)] += sum * sum;
      }
    }
    for (size_t c = 0; c < kWidth; ++c) {
      const double mean = sums[c] / kDraws, variance = squares[c] / kDraws - mean * mean;
      EXPECT_GT(variance, 0.1);
      EXPECT_NEAR(mean, dense[c], 5 * std::sqrt(variance / kDraws)) << random << " " << c;
    }
  }
}

TEST(Select, DrawsAreAFunctionOfTheStream) {
  const Tensor norms = norms_of(random_norms(200, 1));
  Rng rng(9);
  const Rng::State start = rng.state();
  const Rows first = rows_of(Selection::importance(norms, 20, rng)),
             second = rows_of(Selection::importance(norms, 20, rng)),
             third = rows_of(Selection::random(200, 20, rng, Device::cpu()));
  EXPECT_NE(first, second);
  EXPECT_EQ(rng.state().offset, start.offset + 3);
  rng.set_state(start);
  EXPECT_EQ(rows_of(Selection::importance(norms, 20, rng)), first);
  EXPECT_EQ(rows_of(Selection::importance(norms, 20, rng)), second);
  EXPECT_EQ(rows_of(Selection::random(200, 20, rng, Device::cpu())), third);
}

TEST(Select, ErrorsSayWhatToDo) {
  Rng rng(1);
  const Tensor norms = norms_of({1, 2, 3});
  expect_error([&] { Selection::top_norm(norms, 4); }, {"select top_norm", "n = 4", "3 rows", "at most 3"});
  expect_error([&] { Selection::importance(norms, 4, rng); }, {"select importance", "n = 4"});
  expect_error([&] { Selection::random(3, 4, rng, Device::cpu()); }, {"select random", "n = 4"});
  expect_error([&] { Selection::first(3, 4, Device::cpu()); }, {"select first", "n = 4"});
  expect_error([&] { Selection::first(3, -1, Device::cpu()); }, {"select first", "n = -1", "0 or more"});
  expect_error([&] { Selection::first(-3, 0, Device::cpu()); }, {"select first", "-3 rows"});
  expect_error([&] { Selection::random(int64_t{1} << 31, 1, rng, Device::cpu()); }, {"2147483648 rows"});
  expect_error([&] { Selection::threshold(norms, kNanF); }, {"select threshold", "NaN"});
  expect_error([&] { Selection::threshold(norms, 1, {.n = number(1)}); }, {"counts.n", "expected none"});
  expect_error([&] { Selection::top_norm(Tensor(), 0); }, {"norms is undefined"});
  expect_error([&] { Selection::top_norm(norms.reshape({1, 3}), 0); }, {"f32[1, 3]", "rank 1"});
  expect_error([&] { Selection::top_norm(norms.to(DType::i64), 0); }, {"i64[3]", "f64, f32, bf16 or f16"});
  expect_error([&] { Selection::top_norm(norms, 1, {.n = norms}); }, {"counts.n", "f32[3]", "i32 [1]"});
  expect_error([&] { Selection::top_norm(norms, 1, {.rows = number(1).to(DType::i64)}); },
               {"counts.rows", "i64[1]", "i32 [1]"});
  expect_error([&] { Selection::importance(norms, 1, rng, {.n = norms}); },
               {"select importance", "counts.n"});
  expect_error([&] { Selection::random(3, 1, rng, Device::cpu(), {.rows = norms}); }, {"counts.rows"});
  EXPECT_EQ(rng.state().offset, 0u);  // what throws draws nothing
}

// ---- moving the rows ----

TEST(SelectedRows, GatherThenScatterByHand) {
  const Selection chosen{.indices = Tensor::from(std::vector<int32_t>{1, 3, 4, 4}, {4}),
                         .scales = Tensor::from(std::vector<float>{2, 10, 0, 0}, {4}),
                         .rows = 4};
  const Tensor x = counting({4, 2}, 1);
  EXPECT_EQ(gather_selected(x, chosen).to_vector<double>(), (std::vector<double>{3, 4, 7, 8, 0, 0, 0, 0}));
  EXPECT_EQ(gather_selected(x, chosen, RowScale::selection).to_vector<double>(),
            (std::vector<double>{6, 8, 70, 80, 0, 0, 0, 0}));
  EXPECT_EQ(scatter_selected(x, chosen).to_vector<double>(), (std::vector<double>{0, 0, 1, 2, 0, 0, 3, 4}));
  EXPECT_EQ(scatter_selected(x, chosen, RowScale::selection).to_vector<double>(),
            (std::vector<double>{0, 0, 2, 4, 0, 0, 30, 40}));
}

TEST(SelectedRows, PaddingRowsAreNotReadAndWriteZeros) {
  const Selection chosen = Selection::top_norm(norms_of({1, 2, 3}), 3, {.n = number(1)});
  Tensor x = Tensor::full({3, 2}, 5, DType::f32, Device::cpu());
  x.slice(0, 1, 3).fill(kNanF);
  EXPECT_EQ(scatter_selected(x, chosen, RowScale::selection).to_vector<float>(),
            (std::vector<float>{0, 0, 0, 0, 5, 5}));
  Tensor y = Tensor::full({3, 2}, kNanF, DType::f32, Device::cpu());
  y.slice(0, 2, 3).fill(7);
  EXPECT_EQ(gather_selected(y, chosen, RowScale::selection).to_vector<float>(),
            (std::vector<float>{7, 7, 0, 0, 0, 0}));
}

TEST(SelectedRows, AllRowsAreTheTensorItself) {
  Rng rng(1);
  const Tensor norms = norms_of(random_norms(9, 2));
  const Tensor x = counting({9, 4}, 1);
  for (const Selection& chosen :
       {Selection::first(9, 9, Device::cpu()), Selection::top_norm(norms, 9),
        Selection::random(9, 9, rng, Device::cpu()), Selection::importance(norms, 9, rng)}) {
    const Tensor y = gather_selected(x, chosen, RowScale::selection);
    EXPECT_EQ(y.to_vector<double>(), x.to_vector<double>());
    EXPECT_EQ(scatter_selected(y, chosen, RowScale::selection).to_vector<double>(), x.to_vector<double>());
  }
}

TEST(SelectedRows, ErrorsNameTheOperand) {
  const Selection chosen = Selection::first(4, 2, Device::cpu());
  const Tensor x = counting({4, 2}, 1);
  expect_error([&] { gather_selected(Tensor(), chosen); }, {"gather_selected", "x is undefined"});
  expect_error([&] { gather_selected(x, Selection{}); }, {"gather_selected", "no indices"});
  expect_error([&] { gather_selected(counting({5, 2}, 1), chosen); }, {"f64[5, 2]", "expected 4 rows"});
  expect_error([&] { scatter_selected(x, chosen); }, {"scatter_selected", "f64[4, 2]", "expected 2 rows"});
  expect_error([&] { gather_selected(x.to(DType::i64), chosen); }, {"i64[4, 2]", "f64, f32, bf16 or f16"});
  const auto given = [&](std::vector<int32_t> rows) {
    return Selection{.indices = Tensor::from(rows, {int64_t(rows.size())}), .rows = 4};
  };
  expect_error([&] { gather_selected(x, given({2, 1})); }, {"index 1 at position 1", "ascending"});
  expect_error([&] { gather_selected(x, given({2, 2})); }, {"index 2 at position 1", "each once"});
  expect_error([&] { gather_selected(x, given({-1})); }, {"index -1 at position 0"});
  expect_error([&] { gather_selected(x, given({5})); }, {"index 5 at position 0"});
  expect_error([&] { gather_selected(x, given({4, 0})); }, {"index 0 at position 1 follows 4"});
  expect_error([&] { gather_selected(x, given({0}), RowScale::selection); }, {"no scales"});
  Selection odd = chosen;
  odd.scales = Tensor::from(std::vector<float>{1}, {1});
  expect_error([&] { gather_selected(x, odd, RowScale::selection); },
               {"scales is f32[1]", "expected f32 [2]"});
  odd = chosen;
  odd.indices = odd.indices.to(DType::i64);
  expect_error([&] { gather_selected(x, odd); }, {"indices is i64[2]", "expected i32 [2]"});
}

TEST(RowNorms, AreF32OfEveryDtypeAndSkipNothing) {
  const Tensor x = Tensor::from(std::vector<double>{3, 4, 0, 0, 1, 1e-3}, {3, 2});
  const auto norms = row_norms(x.to(DType::bf16));
  EXPECT_EQ(norms.dtype(), DType::f32);
  // 1 + 1e-6 is not a bf16: the norm is not rounded to the dtype of the rows.
  EXPECT_EQ(norms.to_vector<float>()[0], 5.0f);
  EXPECT_EQ(norms.to_vector<float>()[1], 0.0f);
  EXPECT_GT(norms.to_vector<float>()[2], 1.0f);
  EXPECT_EQ(row_norms(x).dtype(), DType::f64);
  EXPECT_EQ(row_norms(x.reshape({3, 1, 2}).transpose(1, 2)).to_vector<double>()[0], 5.0);
  EXPECT_EQ(row_norms(Tensor::zeros({2, 0}, DType::f32, Device::cpu())).to_vector<float>(),
            (std::vector<float>{0, 0}));
  // Squares that overflow f32 do not overflow the norm.
  EXPECT_EQ(row_norms(Tensor::full({1, 4}, 1e30, DType::f32, Device::cpu())).item<float>(), 2e30f);
  expect_error([&] { row_norms(Tensor::zeros({}, DType::f32, Device::cpu())); },
               {"row_norms", "one dimension"});
}

// ---- on a GPU ----

using SelectCuda = GuardedCuda<0>;

bool same_bytes(const Tensor& a, const Tensor& b) {
  const Tensor x = a.to(Device::cpu()).packed(), y = b.to(Device::cpu()).packed();
  return x.shape() == y.shape() && (x.bytes() == 0 || std::memcmp(x.raw(), y.raw(), x.bytes()) == 0);
}

void expect_same_selection(const Selection& gpu, const Selection& cpu, const std::string& what) {
  EXPECT_TRUE(same_bytes(gpu.count, cpu.count))
      << what << ": count " << gpu.count.item<int32_t>() << ", not " << cpu.count.item<int32_t>();
  EXPECT_TRUE(same_bytes(gpu.indices, cpu.indices)) << what << ": indices";
  EXPECT_TRUE(same_bytes(gpu.scales, cpu.scales)) << what << ": scales";
}

/// Norms of which each kind goes wrong in its own way.
std::vector<std::pair<std::string, std::vector<float>>> kinds_of_norms(int64_t rows, uint64_t seed) {
  std::vector<std::pair<std::string, std::vector<float>>> kinds;
  const auto change = [&](const char* name, auto&& value) {
    std::vector<float> norms = random_norms(rows, seed, 2);
    for (size_t i = 0; i < norms.size(); ++i) norms[i] = value(i, norms[i]);
    kinds.emplace_back(name, norms);
  };
  change("spread", [](size_t, float norm) { return norm; });
  change("equal", [](size_t, float) { return 3.0f; });
  change("zero", [](size_t, float) { return 0.0f; });
  change("few values", [](size_t i, float) { return float(i * i % 7); });
  change("mostly zero", [](size_t i, float norm) { return i % 17 == 3 ? norm : -0.0f; });
  change("last digit",
         [](size_t i, float) { return std::bit_cast<float>(0x3F800000u + uint32_t(i * 37 % 97)); });
  change("subnormal", [](size_t i, float) { return std::bit_cast<float>(uint32_t(i * 101 % 4099)); });
  change("one large", [&](size_t i, float norm) { return i == size_t(rows / 2) ? 1e30f : norm * 1e-20f; });
  change("special", [](size_t i, float norm) {
    return i % 11 == 0 ? kNanF : i % 11 == 4 ? kInfF : i % 11 == 7 ? -kInfF : i % 11 == 9 ? -norm : norm;
  });
  return kinds;
}

/// Every way of choosing, as a function of where the norms are. The Rng starts at the same state each time.
struct Way {
  std::string name;
  std::function<Selection(const Tensor& norms, int64_t n, const SelectionCounts& counts, Rng& rng)> choose;
};
std::vector<Way> ways() {
  return {
      {"first", [](const Tensor& norms, int64_t n, const SelectionCounts& counts,
                   Rng&) { return Selection::first(norms.count(), n, norms.device(), counts); }},
      {"top_norm", [](const Tensor& norms, int64_t n, const SelectionCounts& counts,
                      Rng&) { return Selection::top_norm(norms, n, counts); }},
      {"threshold", [](const Tensor& norms, int64_t, const SelectionCounts& counts,
                       Rng&) { return Selection::threshold(norms, 1.5, {.rows = counts.rows}); }},
      {"random", [](const Tensor& norms, int64_t n, const SelectionCounts& counts,
                    Rng& rng) { return Selection::random(norms.count(), n, rng, norms.device(), counts); }},
      {"importance", [](const Tensor& norms, int64_t n, const SelectionCounts& counts,
                        Rng& rng) { return Selection::importance(norms, n, rng, counts); }},
  };
}

TEST(Select, ASubnormalNormIsAPositiveOne) {
  Rng rng(3);
  for (int draw = 0; draw < 8; ++draw) {
    const Selection chosen = Selection::importance(norms_of({0, 0, 1e-40f, 0}), 1, rng);
    EXPECT_EQ(chosen.indices.to_vector<double>(), std::vector<double>{2}) << draw;
  }
}

TEST(Select, PointsAreCountedExactlyWhereDoublesAnd64BitsAreTooShort) {
  // Right before point k - 1 with the largest offset, the estimate in f64 is one too large; the products of
  // the later points are beyond 2^64.
  for (const uint64_t total : {uint64_t{1000}, (uint64_t{1} << 62) + 12345, (uint64_t{1} << 63) - 1})
    for (const uint32_t picks : {3u, 7u, 1001u})
      for (const uint64_t offset : {uint64_t{0}, total / 2, total - 1}) {
        Cut cut;
        cut.weighted = 1, cut.picks = picks, cut.total = total, cut.offset = offset;
        cut.density = double(picks) / double(total);
        for (uint32_t n = 1; n < picks; n += 1 + picks / 20)
          for (const uint64_t place :
               {uint64_t(Wide(n) * total / picks), uint64_t(Wide(n) * total / picks) + 1}) {
            uint32_t before = 0;
            while (before < picks && Wide(offset) + Wide(before) * total < Wide(place) * picks) ++before;
            ASSERT_EQ(cut.points_before(place), before)
                << total << " " << picks << " " << offset << " " << n << " " << place;
          }
      }
}

TEST(Select, ManyEqualNormsAreTakenAtEqualDistances) {
  constexpr int64_t kRows = 200'000, kN = 100'000;
  Rng rng(3);
  const Selection chosen = Selection::importance(norms_of(std::vector<float>(kRows, 3.0f)), kN, rng);
  const auto indices = chosen.indices.to_vector<double>();
  ASSERT_EQ(chosen.count.item<int32_t>(), kN);
  for (size_t i = 1; i < indices.size(); ++i) ASSERT_EQ(indices[i] - indices[i - 1], 2) << i;
}

/// Those that this GPU has, after `others`.
std::vector<std::string> variants_of(Device gpu, std::vector<std::string> others = {}) {
  others.insert(others.end(), {"block", "grid"});
  if (gpu.info().major == 9) others.emplace_back("cluster");
  return others;
}

TEST_F(SelectCuda, ChoosesTheRowsOfTheCpuOnEveryVariant) {
  uint64_t seed = 1000;
  for (const int64_t rows : {1, 3, 4, 5, 31, 1023, 1024, 1025, 4097, 16384, 16385, 100003})
    for (const auto& [kind, values] : kinds_of_norms(rows, ++seed))
      for (const int64_t n : {int64_t{0}, int64_t{1}, rows / 10, rows / 2 + 1, rows - 1, rows}) {
        const Tensor norms = norms_of(values), on_gpu = norms.to(gpu());
        for (const Way& way : ways()) {
          Rng rng(seed + uint64_t(n));
          const Selection cpu = way.choose(norms, n, {}, rng);
          for (const std::string& variant : variants_of(gpu(), {""})) {
            std::optional<ForceVariant> force;
            if (!variant.empty()) force.emplace("select", variant);
            Rng same(seed + uint64_t(n));
            expect_same_selection(way.choose(on_gpu, n, {}, same), cpu,
                                  way.name + " " + kind + " n=" + std::to_string(n) +
                                      " M=" + std::to_string(rows) + " variant " + variant);
          }
        }
      }
}

TEST_F(SelectCuda, CountsOnTheDeviceAreThoseOfTheCpu) {
  const Tensor norms = norms_of(random_norms(5000, 3)), on_gpu = norms.to(gpu());
  for (const int32_t n : {-5, 0, 1, 77, 500, 100000})
    for (const int32_t rows : {-1, 0, 1, 499, 1024, 4999, 100000})
      for (const Way& way : ways())
        for (const std::string& variant : variants_of(gpu())) {
          const ForceVariant force("select", variant);
          Rng rng(5), same(5);
          const Selection cpu = way.choose(norms, 500, {number(n), number(rows)}, rng);
          expect_same_selection(way.choose(on_gpu, 500, {number(n, gpu()), number(rows, gpu())}, same), cpu,
                                way.name + " n=" + std::to_string(n) + " rows=" + std::to_string(rows));
        }
}

TEST_F(SelectCuda, NormsMayStartAnywhere) {
  const Tensor norms = norms_of(random_norms(3003, 4)), on_gpu = norms.to(gpu());
  for (const int64_t from : {1, 2, 3, 5})
    for (const Way& way : ways())
      for (const std::string& variant : variants_of(gpu())) {
        const ForceVariant force("select", variant);
        Rng rng(5), same(5);
        const Selection cpu = way.choose(norms.slice(0, from, 3000), 300, {}, rng);
        expect_same_selection(way.choose(on_gpu.slice(0, from, 3000), 300, {}, same), cpu, way.name);
      }
}

TEST_F(SelectCuda, MillionsOfRows) {
  constexpr int64_t kRows = 4'000'037;
  const Tensor norms = norms_of(random_norms(kRows, 6)), on_gpu = norms.to(gpu());
  for (const Way& way : ways()) {
    Rng rng(5), same(5);
    expect_same_selection(way.choose(on_gpu, kRows / 10, {}, same), way.choose(norms, kRows / 10, {}, rng),
                          way.name);
  }
}

TEST_F(SelectCuda, ReplaysReadNormsAndCountsAndDrawOn) {
  constexpr int64_t kRows = 20011, kN = 2000;
  const Tensor norms = Tensor::empty_packed({kRows}, DType::f32, gpu()), n = number(0, gpu()),
               rows = number(0, gpu());
  const Tensor x = Tensor::empty({kRows, 24}, DType::bf16, gpu());
  for (const Way& way : ways())
    for (const std::string& variant : variants_of(gpu())) {
      const ForceVariant force("select", variant);
      Rng rng(77), eager(77);
      Selection chosen;
      Tensor sparse;
      Captured step(gpu(), [&] {
        chosen = way.choose(norms, kN, {n, rows}, rng);
        sparse = scatter_selected(gather_selected(x, chosen, RowScale::selection), chosen);
      });
      for (int call = 0; call < 5; ++call) {
        const Tensor fresh = norms_of(random_norms(kRows, uint64_t(call) + 50));
        const int32_t wanted = 100 + 300 * call, live = int32_t(kRows) - 4000 * call;
        norms.copy_from(fresh);
        n.fill(wanted);
        rows.fill(live);
        fill_normal(x, 0, 1, rng);
        fill_normal(Tensor::empty({1}, DType::f32, Device::cpu()), 0, 1, eager);  // one stream, as above
        step();
        const Selection cpu = way.choose(fresh, kN, {number(wanted), number(live)}, eager);
        expect_same_selection(chosen, cpu, way.name + " call " + std::to_string(call));
        const Tensor x_cpu = x.to(Device::cpu());
        EXPECT_TRUE(
            same_bytes(sparse.packed(),
                       scatter_selected(gather_selected(x_cpu, cpu, RowScale::selection), cpu).packed()))
            << way.name << " call " << call;
      }
      EXPECT_TRUE(step.is_graph());
    }
}

TEST_F(SelectCuda, RowsMovedAreThoseOfTheCpu) {
  Rng rng(12);
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16})
    for (const int64_t rows : {1, 33, 1000, 40009})
      for (const int64_t width : {1, 3, 8, 65, 768}) {
        if (rows * width > 10'000'000) continue;
        const Tensor x = Tensor::empty({rows, width}, dtype, Device::cpu());
        fill_normal(x, 0, 1, rng);
        for (const int64_t n : {int64_t{0}, int64_t{1}, rows / 10, rows}) {
          const Selection cpu =
              Selection::random(rows, n, rng, Device::cpu(), {.rows = number(int32_t(rows - rows / 3))});
          const Selection on_gpu{
              .indices = cpu.indices.to(gpu()), .scales = cpu.scales.to(gpu()), .rows = rows};
          for (const RowScale scale : {RowScale::none, RowScale::selection}) {
            const Tensor compact = gather_selected(x, cpu, scale);
            EXPECT_TRUE(same_bytes(gather_selected(x.to(gpu()), on_gpu, scale).packed(), compact.packed()))
                << dtype << " " << rows << " " << width << " " << n;
            EXPECT_TRUE(same_bytes(scatter_selected(compact.to(gpu()), on_gpu, scale).packed(),
                                   scatter_selected(compact, cpu, scale).packed()))
                << dtype << " " << rows << " " << width << " " << n;
          }
        }
      }
}

}  // namespace
}  // namespace tessera::ops
