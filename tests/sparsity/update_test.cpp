#include "sparsity/update.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "ops/random/random.h"
#include "ops/reduce/reduce.h"
#include "sparsity/allocation.h"
#include "sparsity/allocation_file.h"
#include "sparsity/masks.h"
#include "sparsity/scores.h"
#include "tests/io/files.h"
#include "tests/sparsity/matrices.h"

namespace tessera::sparsity {
namespace {

using io::test::throws;
using test::Matrix;
using test::matrix_of;

Tensor normal(const Shape& shape, uint64_t seed) {
  Rng rng(seed);
  const Tensor x = Tensor::empty_packed(shape, DType::f32, Device::cpu());
  ops::fill_normal(x, 0, 1, rng);
  return x;
}

/// Inputs that depend on each other, as those of a trained model; input 3 is dead.
struct Inputs {
  explicit Inputs(int64_t in, int64_t tokens = 200) : statistics(InputStatistics::Sums::products) {
    x = normal({tokens, in}, 7);
    for (int64_t j = 1; j < in; ++j) {
      const Tensor column = x.slice(1, j, j + 1), before = x.slice(1, j - 1, j).clone();
      const std::vector<float> a = column.clone().to_vector<float>(), b = before.to_vector<float>();
      std::vector<float> mixed(a.size());
      for (size_t t = 0; t < a.size(); ++t) mixed[t] = 0.5f * a[t] + 0.8f * b[t] * float(1 + j % 3);
      column.copy_from(Tensor::from(mixed, {tokens, 1}));
    }
    x.slice(1, 3, 4).fill(0);
    statistics.add(x.slice(0, 0, 50));
    statistics.add(x.slice(0, 50, tokens));
  }
  Tensor x;
  InputStatistics statistics;
};

/// SparseGPT's Hessian, as its authors' program makes it: 2 X^T X / samples, dead inputs, damping.
Matrix hessian_of(const Tensor& inputs, double samples, double damping) {
  const Matrix x = matrix_of(inputs);
  const size_t n = x[0].size();
  Matrix h(n, std::vector<double>(n));
  for (const auto& row : x)
    for (size_t i = 0; i < n; ++i)
      for (size_t j = 0; j < n; ++j) h[i][j] += 2 / samples * row[i] * row[j];
  double mean = 0;
  for (size_t i = 0; i < n; ++i) {
    if (h[i][i] == 0) h[i][i] = 1;
    mean += h[i][i] / double(n);
  }
  for (size_t i = 0; i < n; ++i) h[i][i] += damping * mean;
  return h;
}

Matrix inverse_of(Matrix a) {
  const size_t n = a.size();
  Matrix inverse(n, std::vector<double>(n));
  for (size_t i = 0; i < n; ++i) inverse[i][i] = 1;
  for (size_t i = 0; i < n; ++i) {
    const double pivot = a[i][i];
    for (size_t j = 0; j < n; ++j) a[i][j] /= pivot, inverse[i][j] /= pivot;
    for (size_t r = 0; r < n; ++r) {
      if (r == i) continue;
      const double factor = a[r][i];
      for (size_t j = 0; j < n; ++j) a[r][j] -= factor * a[i][j], inverse[r][j] -= factor * inverse[i][j];
    }
  }
  return inverse;
}

/// A = U^T U
Matrix upper_factor(const Matrix& a) {
  const size_t n = a.size();
  Matrix u(n, std::vector<double>(n));
  for (size_t i = 0; i < n; ++i)
    for (size_t j = i; j < n; ++j) {
      double sum = a[i][j];
      for (size_t k = 0; k < i; ++k) sum -= u[k][i] * u[k][j];
      u[i][j] = i == j ? std::sqrt(sum) : sum / u[i][i];
    }
  return u;
}

/// SparseGPT's sweep, column by column; with `given` of a mask that is known.
Matrix sparsegpt_by_hand(Matrix w, const Matrix& u, double sparsity, size_t block_size, Pattern pattern,
                         const Matrix* given = nullptr) {
  const size_t rows = w.size(), n = w[0].size();
  for (size_t begin = 0; begin < n; begin += block_size) {
    const size_t end = std::min(begin + block_size, n);
    std::vector<double> scores;
    const auto score = [&](size_t r, size_t c) { return w[r][c] * w[r][c] / (u[c][c] * u[c][c]); };
    for (size_t r = 0; r < rows; ++r)
      for (size_t c = begin; c < end; ++c) scores.push_back(score(r, c));
    std::vector<double> sorted = scores;
    std::sort(sorted.begin(), sorted.end());
    const double limit = sorted[size_t(double(sorted.size()) * sparsity)];
    for (size_t r = 0; r < rows; ++r) {
      std::vector<bool> keep(n, true);
      for (size_t c = begin; c < end; ++c)
        keep[c] = given ? (*given)[r][c] != 0 : scores[r * (end - begin) + c - begin] >= limit;
      for (size_t c = begin; c < end; ++c) {
        if (pattern.structured() && (c - begin) % size_t(pattern.group) == 0) {
          std::vector<std::pair<double, size_t>> order;
          for (size_t j = c; j < c + size_t(pattern.group); ++j)
            order.push_back({score(r, j), j}), keep[j] = true;
          std::sort(order.begin(), order.end());
          for (size_t i = 0; i < size_t(pattern.zeros); ++i) keep[order[i].second] = false;
        }
        const double q = keep[c] ? w[r][c] : 0, error = (w[r][c] - q) / u[c][c];
        w[r][c] = q;
        for (size_t k = c + 1; k < n; ++k) w[r][k] -= error * u[c][k];
      }
    }
  }
  return w;
}

TEST(Update, ObsIsSparseGpt) {
  const Inputs inputs(24);
  const Tensor weight = normal({10, 24}, 5);
  const Matrix u = upper_factor(inverse_of(hessian_of(inputs.x, 4, 0.01)));
  const HessianFactor factor = factor_hessian(inputs.statistics, 4, 0.01, "layer");
  EXPECT_EQ(factor.damping, 0.01);
  EXPECT_EQ(factor.raised, 0);
  // Not scaled by 2 / samples, which is a factor of all of U.
  const Matrix ours = matrix_of(factor.u);
  for (size_t i = 0; i < 24; ++i)
    for (size_t j = 0; j < 24; ++j)
      EXPECT_NEAR(ours[i][j] / std::sqrt(0.5), u[i][j], 2e-5 * u[i][i]) << i << " " << j;
  for (const Pattern pattern : {Pattern{}, Pattern{2, 4}, Pattern{3, 8}})
    for (const int64_t block : {8, 16, 24, 128}) {
      PruneOptions options{
          .score = Score::sparsegpt, .update = Update::obs, .pattern = pattern, .block_size = block};
      const Matrix pruned = matrix_of(update_obs(weight, {}, factor.u, 0.5, options)),
                   expected = sparsegpt_by_hand(matrix_of(weight), u, 0.5, size_t(block), pattern);
      for (size_t r = 0; r < 10; ++r)
        for (size_t c = 0; c < 24; ++c) {
          EXPECT_EQ(pruned[r][c] == 0, expected[r][c] == 0)
              << pattern.name() << " " << block << ": " << r << " " << c;
          EXPECT_NEAR(pruned[r][c], expected[r][c], 1e-3) << pattern.name() << " " << block;
        }
    }
}

TEST(Update, ObsOfAGivenMaskKeepsIt) {
  const Inputs inputs(24);
  const Tensor weight = normal({6, 24}, 5), keep = ops::keep_largest(magnitude(weight), {.zeros = 14});
  const HessianFactor factor = factor_hessian(inputs.statistics, 4, 0.01, "layer");
  const Tensor pruned = update_obs(weight, keep, factor.u, 0.5, {.update = Update::obs, .block_size = 7});
  EXPECT_TRUE(io::test::same(mask_of(pruned).words, mask_of(keep).words));
  const double obs = relative_output_error(weight, pruned, inputs.statistics),
               none = relative_output_error(weight, keep_elements(weight, keep), inputs.statistics);
  EXPECT_LT(obs, none);
  const Matrix mask = matrix_of(keep.to(DType::f32)), ours = matrix_of(pruned);
  const Matrix u = upper_factor(inverse_of(hessian_of(inputs.x, 4, 0.01)));
  const Matrix expected = sparsegpt_by_hand(matrix_of(weight), u, 0.5, 24, {}, &mask);
  for (size_t r = 0; r < 6; ++r)
    for (size_t c = 0; c < 24; ++c) EXPECT_NEAR(ours[r][c], expected[r][c], 1e-3) << r << " " << c;
}

TEST(Update, RoundedWeightsLieOnTheirGrid) {
  const Inputs inputs(16);
  const Tensor weight = normal({5, 16}, 6);
  const HessianFactor factor = factor_hessian(inputs.statistics, 4, 0.01, "layer");
  const Matrix dense = matrix_of(weight);
  const Matrix rounded = matrix_of(
      update_obs(weight, {}, factor.u, 0.5, {.score = Score::sparsegpt, .update = Update::obs, .bits = 3}));
  int64_t zeros = 0;
  for (size_t r = 0; r < 5; ++r) {
    const auto [low, high] = std::ranges::minmax_element(dense[r]);
    const double step = (*high - *low) / 7;
    for (size_t c = 0; c < 16; ++c) {
      const double level = rounded[r][c] / step;
      EXPECT_NEAR(level, std::nearbyint(level), 1e-4);
      EXPECT_LT(std::abs(level), 7.5);
      zeros += rounded[r][c] == 0;
    }
  }
  EXPECT_GE(zeros, 40);  // half, and small weights that were rounded to 0
}

TEST(Update, AdmmFindsTheLeastSquaresSolutionOfItsMask) {
  const Inputs inputs(12);
  const Tensor weight = normal({4, 12}, 8), keep = ops::keep_largest(magnitude(weight), {.zeros = 6});
  PruneOptions options{.update = Update::admm, .damping = 1e-4, .iterations = 3000};
  const Tensor pruned = update_admm(weight, keep, inputs.statistics, options, "layer");
  EXPECT_TRUE(io::test::same(mask_of(pruned).words, mask_of(keep).words));
  // The gradient of ||(W - V) X||^2 (and of the damping) in the kept weights is 0: compare with the
  // residual's size.
  const Matrix h = hessian_of(inputs.x, 2, 0);
  const Matrix w = matrix_of(weight), v = matrix_of(pruned), kept = matrix_of(keep.to(DType::f32));
  for (size_t r = 0; r < 4; ++r)
    for (size_t j = 0; j < 12; ++j) {
      if (kept[r][j] == 0 || j == 3) continue;
      double gradient = 0, size = 0;
      for (size_t k = 0; k < 12; ++k)
        gradient += (w[r][k] - v[r][k]) * h[k][j], size += std::abs((w[r][k] - v[r][k]) * h[k][j]);
      gradient += 1e-4 * (w[r][j] - v[r][j]) * h[j][j];
      EXPECT_LT(std::abs(gradient), 2e-3 * size) << r << " " << j;
    }
  options.iterations = 20;
  const double few = relative_output_error(
                   weight, update_admm(weight, keep, inputs.statistics, options, "layer"), inputs.statistics),
               none = relative_output_error(weight, keep_elements(weight, keep), inputs.statistics);
  EXPECT_LT(few, 0.7 * none);
}

TEST(Update, DampingIsRaisedUntilTheHessianIsPositiveDefinite) {
  // Two inputs that are the same, with a rounding error that makes X^T X indefinite.
  InputStatistics statistics(InputStatistics::Sums::products);
  statistics.add(Tensor::from(std::vector<float>{1, 1, 2, 2, 3, 3}, {3, 2}));
  statistics.products().slice(0, 0, 1).slice(1, 1, 2).fill(14 * 1.05);
  const HessianFactor factor = factor_hessian(statistics, 1, 0.01, "layer");
  EXPECT_EQ(factor.raised, 1);
  EXPECT_DOUBLE_EQ(factor.damping, 0.1);
  statistics.products().slice(0, 0, 1).slice(1, 1, 2).fill(14 * 2.5);
  EXPECT_TRUE(throws([&] { factor_hessian(statistics, 1, 0.01, "h.0.c_fc"); },
                     "X^T X of h.0.c_fc is not positive definite, even with a damping of 1 times"));
  statistics.products().fill(double(std::numeric_limits<float>::quiet_NaN()));
  EXPECT_TRUE(throws([&] { factor_hessian(statistics, 1, 0.01, "layer"); }, "give more samples (--samples)"));
}

TEST(Scores, AreTheFormulas) {
  const Inputs inputs(8);
  const Tensor weight = normal({3, 8}, 4);
  const Matrix w = matrix_of(weight);
  const std::vector<double> squares = inputs.statistics.squares().to_vector<double>();
  const Matrix wanda = matrix_of(score_matrix(weight, &inputs.statistics, 5, {})),
               ria = matrix_of(
                   score_matrix(weight, &inputs.statistics, 5, {.score = Score::ria, .ria_power = 0.7})),
               size = matrix_of(score_matrix(weight, nullptr, 0, {.score = Score::magnitude}));
  for (size_t r = 0; r < 3; ++r)
    for (size_t c = 0; c < 8; ++c) {
      double row = 0, column = 0;
      for (size_t i = 0; i < 8; ++i) row += std::abs(w[r][i]);
      for (size_t i = 0; i < 3; ++i) column += std::abs(w[i][c]);
      const double norm = std::sqrt(squares[c] / 5), a = std::abs(w[r][c]);
      EXPECT_EQ(size[r][c], a);
      EXPECT_NEAR(wanda[r][c], a * norm, 1e-6 * a * norm);
      EXPECT_NEAR(ria[r][c], (a / row + a / column) * std::pow(norm, 0.7), 1e-5);
    }
  EXPECT_EQ(inputs.statistics.dead(), 1);
  EXPECT_EQ(inputs.statistics.tokens(), 200);
}

TEST(Scores, TheVariantDropsTheLowestShareOfEachRowsSum) {
  const Tensor scores = magnitude(normal({40, 50}, 9));
  const Tensor keep = keep_by_row_sums(scores, 0.5, "some");
  const Matrix s = matrix_of(scores), k = matrix_of(keep.to(DType::f32));
  double zeros = 0, least = 1, most = 0;
  for (size_t r = 0; r < 40; ++r) {
    double largest_dropped = 0, smallest_kept = 1e9, dropped = 0, sum = 0;
    for (size_t c = 0; c < 50; ++c) {
      (k[r][c] != 0 ? smallest_kept : largest_dropped) =
          k[r][c] != 0 ? std::min(smallest_kept, s[r][c]) : std::max(largest_dropped, s[r][c]);
      sum += s[r][c], dropped += k[r][c] != 0 ? 0 : s[r][c], zeros += k[r][c] == 0;
    }
    EXPECT_LE(largest_dropped, smallest_kept);
    least = std::min(least, (dropped + smallest_kept) / sum), most = std::max(most, dropped / sum);
  }
  EXPECT_NEAR(zeros / 2000, 0.5, 0.001);
  EXPECT_LT(most, least);  // one alpha for all rows lies between what they drop and what one more would make
  EXPECT_TRUE(throws(
      [&] {
        keep_by_row_sums(Tensor::full({2, 3}, 1, DType::f32, Device::cpu()), 0.5, "layers.3.up");
      },
      "of layers.3.up at the nearest, not 0.5; choose another sparsity"));
}

TEST(Scores, TheVariantDropsTheAskedShareOfAMatrixWithoutScores) {
  const Tensor keep = keep_by_row_sums(Tensor::full({3, 8}, 0, DType::f32, Device::cpu()), 0.25, "some");
  for (int64_t r = 0; r < 3; ++r)
    EXPECT_EQ(ops::sum(keep.select(0, r).to(DType::f32)).item<double>(), 6) << r;
}

TEST(Allocation, OwlGivesBlocksWithOutliersMore) {
  const Tensor scores = Tensor::from(std::vector<float>{1, 1, 1, 1, 1, 1, 1, 13}, {2, 4});
  EXPECT_EQ(outlier_share({scores}, 5), 1.0 / 8);
  EXPECT_EQ(outlier_share({scores}, 6), 0);  // the mean is 2.5
  const std::vector<double> sparsities = owl_sparsities({0.1, 0.3, 0.2}, 0.6, 0.05);
  EXPECT_NEAR(sparsities[0], 0.65, 1e-12);
  EXPECT_NEAR(sparsities[1], 0.55, 1e-12);
  EXPECT_NEAR(sparsities[2], 0.6, 1e-12);
  EXPECT_EQ(owl_sparsities({0.1, 0.1}, 0.6, 0.05), (std::vector<double>{0.6, 0.6}));
  // Of many blocks one can be further from the mean than the range: not below 0, and not at 1.
  EXPECT_NEAR(owl_sparsities({9, 1, 1, 1}, 0.2, 0.1).at(0), 0.05, 1e-12);
  EXPECT_TRUE(throws([] { owl_sparsities({9, 1, 1, 1}, 0.1, 0.09); }, "smaller --owl-range"));
  EXPECT_TRUE(throws([] { owl_sparsities({1, 9, 9, 9}, 0.9, 0.09); }, "smaller --owl-range"));
}

TEST(Allocation, FilesAreObjectsOfSparsities) {
  const TemporaryFolder folder;
  const auto read = [&](const std::string& text) {
    put(folder / "a.json", text);
    return read_allocation(folder / "a.json");
  };
  EXPECT_EQ(read("{\"k_proj\": 0.25, \"**\": 0}"),
            (std::vector<std::pair<std::string, double>>{{"k_proj", 0.25}, {"**", 0}}));
  for (const char* text : {"{}", "[]", "3", "{\"a\": 0.5", "no"})
    EXPECT_TRUE(throws([&] { read(text); }, "no JSON object of sparsities")) << text;
  for (const char* text :
       {"{\"a\": 1}", "{\"a\": -0.1}", "{\"a\": \"0.5\"}", "{\"a\": null}", "{\"a\": 1e400}"})
    EXPECT_NE(message_of([&] { read(text); }), "") << text;
  EXPECT_NE(message_of([&] { read_allocation(folder / "none.json"); }), "");
}

}  // namespace
}  // namespace tessera::sparsity
