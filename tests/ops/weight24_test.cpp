#include "ops/sparse24/weight24.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "autograd/tape.h"
#include "ops/bits/bits.h"
#include "ops/linear/linear.h"
#include "ops/matmul/matmul.h"
#include "ops/pointwise/pointwise.h"
#include "ops/random/random.h"
#include "tests/errors.h"
#include "tests/ops/expect.h"
#include "tests/ops/tensors.h"

namespace tessera::ops {
namespace {

/// 1 where the mask keeps an element.
std::vector<double> kept_elements(const Tensor& mask, int64_t columns) {
  return values(unpack_bits(mask, columns, DType::f64));
}

/// The 90 patterns by trying all 65,536 masks, in the order of their rows' pairs.
std::vector<std::array<bool, 16>> all_patterns() {
  std::vector<std::array<bool, 16>> found;
  for (uint32_t bits = 0; bits < 1u << 16; ++bits) {
    std::array<int, 4> of_row{}, of_column{};
    std::array<bool, 16> keeps{};
    for (int i = 0; i < 16; ++i) {
      keeps[size_t(i)] = bits >> i & 1;
      of_row[size_t(i / 4)] += int(bits >> i & 1), of_column[size_t(i % 4)] += int(bits >> i & 1);
    }
    const auto two = [](int count) { return count == 2; };
    if (std::ranges::all_of(of_row, two) && std::ranges::all_of(of_column, two)) found.push_back(keeps);
  }
  // Pair 01 before 02: of two rows that of the earlier kept columns is the lower one.
  std::ranges::sort(found, [](const auto& a, const auto& b) { return a > b; });
  return found;
}

/// The mask by its definition, of a block that lies in a matrix of at least its size.
std::vector<double> mask_by_definition(const std::vector<double>& weight, int64_t rows, int64_t columns) {
  static const auto patterns = all_patterns();
  std::vector<double> mask(weight.size(), 0);
  for (int64_t r = 0; r < rows; r += 4)
    for (int64_t c = 0; c < columns; c += 4) {
      const auto at = [&](int i) { return (r + i / 4) * columns + c + i % 4; };
      const auto inside = [&](int i) { return r + i / 4 < rows && c + i % 4 < columns; };
      double most = -1;
      const std::array<bool, 16>* best = nullptr;
      for (const auto& pattern : patterns) {
        double sum = 0;
        for (int i = 0; i < 16; ++i)
          if (pattern[size_t(i)] && inside(i)) sum += std::abs(weight[size_t(at(i))]);
        if (sum > most) most = sum, best = &pattern;
      }
      for (int i = 0; i < 16; ++i)
        if (inside(i)) mask[size_t(at(i))] = (*best)[size_t(i)];
    }
  return mask;
}

TEST(Transposable24, IsTheBestOfAll90PatternsAndOfEqualOnesTheFirst) {
  EXPECT_EQ(all_patterns().size(), 90u);
  for (const auto& [rows, columns] :
       {std::pair<int64_t, int64_t>{64, 96}, {7, 5}, {4, 34}, {3, 3}, {1, 130}}) {
    // Small integers: sums are exact, and many are equal.
    Rng rng{uint64_t(rows)};
    Tensor weight = Tensor::empty({rows, columns}, DType::f64, Device::cpu());
    fill_normal(weight, 0, 1.5, rng);
    std::vector<double> rounded = values(weight);
    for (double& value : rounded) value = std::round(value);
    weight = Tensor::from(rounded, {rows, columns});
    const std::vector<double> expected = mask_by_definition(rounded, rows, columns);
    for (const DType dtype : {DType::f64, DType::f32, DType::bf16, DType::f16})
      EXPECT_EQ(kept_elements(transposable24(weight.to(dtype)), columns), expected)
          << rows << " x " << columns;
    // Bits past the last column are zero, as of any mask.
    const std::vector<int64_t> counts = count_bits(transposable24(weight)).to_vector<int64_t>();
    for (int64_t r = 0; r < rows; ++r)
      EXPECT_EQ(counts[size_t(r)],
                std::count(expected.begin() + r * columns, expected.begin() + (r + 1) * columns, 1.0));
  }
  const std::vector<double> first{1, 1, 0, 0, 1, 1, 0, 0, 0, 0, 1, 1, 0, 0, 1, 1};
  for (const double value : {0.0, 2.0, -3.0})
    EXPECT_EQ(kept_elements(transposable24(Tensor::full({4, 4}, value, DType::f32, Device::cpu())), 4),
              first);
}

TEST(Transposable24, KeepsTwoOfFourInBothDirections) {
  const int64_t rows = 36, columns = 100;
  const Tensor weight = normal({rows, columns}, 3), mask = transposable24(weight);
  const std::vector<double> keeps = kept_elements(mask, columns);
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = 0; c < columns; ++c) {
      double across = 0, down = 0;
      for (int64_t i = 0; i < 4; ++i) {
        across += keeps[size_t(r * columns + c / 4 * 4 + i)];
        down += keeps[size_t((r / 4 * 4 + i) * columns + c)];
      }
      EXPECT_EQ(across, 2);
      EXPECT_EQ(down, 2);
    }
  // So compressing the masked weight either way loses nothing.
  const Tensor masked = mul(weight, unpack_bits(mask, columns, DType::f64));
  for (const Along24 along : {Along24::features, Along24::tokens})
    EXPECT_EQ(values(decompress24(compress24(masked, along))), values(masked));
}

TEST(Transposable24, NaNCountsAsInfinity) {
  std::vector<double> weight(16, 1);
  weight[5] = std::numeric_limits<double>::quiet_NaN();
  const std::vector<double> keeps = kept_elements(transposable24(Tensor::from(weight, {4, 4})), 4);
  EXPECT_EQ(keeps[5], 1);
  weight[5] = -std::numeric_limits<double>::infinity();
  EXPECT_EQ(kept_elements(transposable24(Tensor::from(weight, {4, 4})), 4), keeps);
}

TEST(Weight24Linear, IsTheMaskedLayerAndTrainsPrunedElementsToo) {
  const int64_t tokens = 6, in = 11, out = 9;
  const Tensor given = normal({tokens, in}, 1), weights = normal({out, in}, 2), dy = normal({tokens, out}, 3);
  const Tensor mask = transposable24(weights);
  const Tensor masked = mul(weights, unpack_bits(mask, in, DType::f64));
  const auto run = [&](bool sparse) {
    Tensor x = given.clone(), weight = (sparse ? weights : masked).clone(), bias = normal({out}, 4),
           residual = normal({tokens, out}, 5);
    for (Tensor* const leaf : {&x, &weight, &bias, &residual}) require_grad(*leaf);
    Tape tape;
    const Tensor y =
        sparse ? weight24_linear(x, weight, mask, bias, residual) : linear(x, weight, bias, residual);
    const std::vector<Tensor> of{y}, grads{dy};
    tape.backward(of, grads);
    return std::array{values(y), values(grad(x)), values(grad(weight)), values(grad(bias)),
                      values(grad(residual))};
  };
  // The gradient of the dense layer's weight, dy^T x, depends on no weight: all five agree.
  const auto sparse = run(true), dense = run(false);
  for (size_t i = 0; i < sparse.size(); ++i) {
    ASSERT_EQ(sparse[i].size(), dense[i].size());
    for (size_t j = 0; j < sparse[i].size(); ++j) EXPECT_NEAR(sparse[i][j], dense[i][j], 1e-12) << i;
  }
  const std::vector<double> keeps = kept_elements(mask, in);
  EXPECT_LT(std::count(keeps.begin(), keeps.end(), 1.0), std::ptrdiff_t(keeps.size() * 2 / 3));
  for (const double gradient : sparse[2]) EXPECT_NE(gradient, 0);
}

TEST(Weight24Linear, ReadsTheMaskItIsGiven) {
  // Another weight's mask, as between two refreshes.
  const Tensor x = normal({5, 8}, 1), weight = normal({4, 8}, 2), mask = transposable24(normal({4, 8}, 3));
  const Tensor masked = mul(weight, unpack_bits(mask, 8, DType::f64));
  const std::vector<double> actual = values(weight24_linear(x, weight, mask)),
                            expected = values(linear(x, masked));
  for (size_t i = 0; i < expected.size(); ++i) EXPECT_NEAR(actual[i], expected[i], 1e-12);
}

TEST(Weight24Linear, ByMvueTheWeightGradientIsThatOfDrawnTokensAndItsMeanThatOfAll) {
  const int64_t tokens = 10, in = 6, out = 9;
  const Tensor given = normal({tokens, in}, 1), weights = normal({out, in}, 2), dy = normal({tokens, out}, 3);
  const Tensor mask = transposable24(weights);
  Rng rng(7), same(7);
  // x, bias and residual get the gradients that they have without it, to the bit.
  const auto run = [&](const std::optional<Rng>& mvue) {
    Tensor x = given.clone(), weight = weights.clone(), bias = normal({out}, 4);
    for (Tensor* const leaf : {&x, &weight, &bias}) require_grad(*leaf);
    Tape tape;
    const std::vector<Tensor> of{weight24_linear(x, weight, mask, bias, {}, mvue)}, grads{dy};
    tape.backward(of, grads);
    return std::array{values(grad(weight)), values(of[0]), values(grad(x)), values(grad(bias))};
  };
  const auto whole = run({});
  constexpr int kDraws = 4000;
  std::vector<double> sums(whole[0].size()), squares(whole[0].size());
  for (int draw = 0; draw < kDraws; ++draw) {
    const auto drawn = run(rng);
    for (size_t i = 1; i < 4; ++i) ASSERT_EQ(drawn[i], whole[i]) << i;
    const Tensor kept = decompress24(compress24(dy, Along24::tokens, Selection24::mvue(same, Device::cpu())));
    const std::vector<double> expected = values(matmul(kept, given, true));
    for (size_t i = 0; i < sums.size(); ++i) {
      ASSERT_NEAR(drawn[0][i], expected[i], 1e-12) << draw;
      sums[i] += drawn[0][i], squares[i] += drawn[0][i] * drawn[0][i];
    }
  }
  for (size_t i = 0; i < sums.size(); ++i) {
    const double mean = sums[i] / kDraws, deviation = std::sqrt((squares[i] / kDraws - mean * mean) / kDraws);
    EXPECT_GT(deviation, 0) << i;  // something is drawn
    EXPECT_LE(std::abs(mean - whole[0][i]), 4.5 * deviation) << i;
  }
}

TEST(Weight24Linear, ByMvueAddsToAGradientAndDrawsOnlyWhereAWeightTrains) {
  const Tensor x = normal({8, 4}, 1), dy = normal({8, 5}, 3), mask = transposable24(normal({5, 4}, 2));
  Rng rng(7);
  Tensor weight = normal({5, 4}, 2);
  const auto backward = [&](Rng& from) {
    Tape tape;
    const std::vector<Tensor> of{weight24_linear(x, weight, mask, {}, {}, from)}, grads{dy};
    if (requires_grad(weight)) tape.backward(of, grads);
  };
  backward(rng);  // frozen
  weight24_linear(x, weight, mask, {}, {}, rng);
  EXPECT_EQ(rng.state(), Rng(7).state());
  require_grad(weight);
  backward(rng);
  const std::vector<double> first = values(grad(weight));
  backward(rng);
  const std::vector<double> both = values(grad(weight));
  zero_grad(weight);
  Rng again(7);
  again.reserve(Device::cpu());
  backward(again);
  const std::vector<double> second = values(grad(weight));
  EXPECT_NE(first, second);
  for (size_t i = 0; i < both.size(); ++i) EXPECT_NEAR(both[i], first[i] + second[i], 1e-12);
}

TEST(MaskedDecay24, DecaysWhatIsPruned) {
  for (const DType dtype : {DType::f64, DType::bf16}) {
    Tensor weight = normal({8, 12}, 2, dtype);
    require_grad(weight);
    const Tensor mask = transposable24(weight);
    const std::vector<double> w = values(weight), keeps = kept_elements(mask, 12);
    double half = 0;
    for (size_t i = 0; i < w.size(); ++i) half += keeps[i] ? 0 : 0.5 * w[i] * w[i];
    Tape tape;
    const Tensor decay = masked_decay24(weight, mask);
    EXPECT_EQ(decay.dtype(), dtype == DType::f64 ? DType::f64 : DType::f32);
    EXPECT_NEAR(decay.item<double>(), half, 1e-5 * half);
    tape.backward(ops::scale(decay, 0.25));
    const std::vector<double> gradient = values(grad(weight));
    for (size_t i = 0; i < w.size(); ++i) EXPECT_NEAR(gradient[i], keeps[i] ? 0 : 0.25 * w[i], 1e-6) << i;
  }
}

TEST(Weight24Linear, RefusesWhatDoesNotFit) {
  const Tensor x = normal({5, 8}, 1), weight = normal({4, 8}, 2);
  EXPECT_NE(message_of([&] { weight24_linear(x, weight, Tensor()); }).find("the mask is"), std::string::npos);
  EXPECT_NE(message_of([&] {
              weight24_linear(x, weight, transposable24(normal({8, 8}, 2)));
            }).find("weight24_linear: the mask is"),
            std::string::npos);
  EXPECT_NE(message_of([&] { masked_decay24(weight, weight); }).find("masked_decay24: the mask is"),
            std::string::npos);
  EXPECT_NE(message_of([&] { transposable24(normal({4}, 2)); }).find("expected a floating matrix [R, C]"),
            std::string::npos);
}

}  // namespace
}  // namespace tessera::ops
