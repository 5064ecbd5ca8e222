#include "ops/gemm/inner_products.h"

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <limits>

#include "ops/gemm/gemm.h"
#include "runtime/parallel.h"
#include "runtime/rng.h"
#include "tests/errors.h"
#include "tests/ops/tensors.h"

extern "C" {
void openblas_set_num_threads(int threads);
int openblas_get_num_threads();
}

namespace tessera::ops {
namespace {

Tensor zeros(const Shape& shape, DType dtype) {
  return Tensor::zeros(shape, dtype, Device::cpu());
}

/// The same by the oracle's plain loops.
Tensor oracle(const Tensor& d, const Tensor& x, const Tensor& y) {
  const Tensor sums = d.clone();
  multiply(sums, x.transpose(0, 1), y, {.accumulate = true});
  return sums;
}

/// Sums of `tokens` products of standard normal numbers, in two orders: each differs from the exact sum by at
/// most tokens * eps times the sum of the products' magnitudes, some 0.64 per token.
void expect_near_sums(const Tensor& a, const Tensor& b, int64_t tokens) {
  const std::vector<double> left = a.clone().to_vector<double>(), right = b.clone().to_vector<double>();
  ASSERT_EQ(left.size(), right.size());
  const double bound = 2 * double(tokens + 1) * 0x1p-53 * 2 * double(tokens + 1);
  for (size_t i = 0; i < left.size(); ++i) ASSERT_NEAR(left[i], right[i], bound) << i;
}

// One tile, several, shorter last ones; one token, one feature.
constexpr std::array<std::array<int64_t, 3>, 9> kProductSizes = {{{1, 1, 1},
                                                                  {1, 5, 3},
                                                                  {50, 16, 1},
                                                                  {33, 64, 64},
                                                                  {20, 65, 129},
                                                                  {300, 200, 130},
                                                                  {7, 400, 300},
                                                                  {100, 1100, 90},
                                                                  {9, 1300, 1300}}};

TEST(GemmInnerProducts, AreTheOracles) {
  for (const auto& [tokens, p, q] : kProductSizes) {
    const Tensor x = drawn({tokens, p}, 1), y = drawn({tokens, q}, 2), start = drawn({p, q}, 3),
                 sums = start.clone();
    add_inner_products(sums, x, y);
    expect_near_sums(sums, oracle(start, x, y), tokens);
    add_inner_products(sums, x, y);
    expect_near_sums(sums, oracle(oracle(start, x, y), x, y), 2 * tokens);
  }
}

TEST(GemmInnerProducts, OfATensorWithItselfAreSymmetricToTheBit) {
  for (const auto& [tokens, n, unused] : kProductSizes) {
    const Tensor x = drawn({tokens, n}, 1), more = drawn({tokens, n}, 2), sums = zeros({n, n}, DType::f64);
    add_gram(sums, x);
    add_gram(sums, more);
    expect_near_sums(sums, oracle(oracle(zeros({n, n}, DType::f64), x, x), more, more), 2 * tokens);
    EXPECT_EQ(sums.to_vector<double>(), sums.transpose(0, 1).clone().to_vector<double>())
        << tokens << " " << n;
  }
}

/// A part of a tensor: rows and columns around it stay what they are.
TEST(GemmInnerProducts, TakePartsOfTensorsAndWriteNothingElse) {
  const Tensor x = drawn({40, 260}, 1).slice(1, 3, 203), y = drawn({40, 150}, 2).slice(1, 20, 120);
  const Tensor whole = drawn({202, 102}, 3), before = whole.clone(),
               part = whole.slice(0, 1, 201).slice(1, 1, 101);
  const Tensor expected = oracle(part.clone(), x.clone(), y.clone());
  add_inner_products(part, x, y);
  expect_near_sums(part, expected, 40);
  const Tensor square = drawn({202, 202}, 4), square_before = square.clone(),
               middle = square.slice(0, 1, 201).slice(1, 1, 201);
  middle.copy_from(oracle(zeros({200, 200}, DType::f64), x.clone(), x.clone()));
  const Tensor twice = oracle(middle.clone(), x.clone(), x.clone());
  add_gram(middle, x);
  expect_near_sums(middle, twice, 80);
  for (const auto& [now, was] : {std::pair{whole, before}, {square, square_before}})
    for (const int64_t edge : {int64_t{0}, now.size(0) - 1})
      EXPECT_EQ(now.slice(0, edge, edge + 1).clone().to_vector<double>(),
                was.slice(0, edge, edge + 1).clone().to_vector<double>());
  for (const auto& [now, was] : {std::pair{whole, before}, {square, square_before}})
    for (const int64_t edge : {int64_t{0}, now.size(1) - 1})
      EXPECT_EQ(now.slice(1, edge, edge + 1).clone().to_vector<double>(),
                was.slice(1, edge, edge + 1).clone().to_vector<double>());
}

TEST(GemmInnerProducts, ThreadsOfTheCpuAndOfOpenBlasChangeNoBit) {
  const int threads = cpu_threads(), blas_threads = openblas_get_num_threads();
  for (const auto& [tokens, p, q] : kProductSizes) {
    const Tensor x = drawn({tokens, p}, 1), y = drawn({tokens, q}, 2);
    std::vector<std::vector<double>> products, squares;
    for (const auto& [own, blas] : {std::pair{1, 1}, {2, 1}, {5, 2}, {3, 3}}) {
      set_cpu_threads(own);
      openblas_set_num_threads(blas);
      const Tensor sums = drawn({p, q}, 3), gram = zeros({p, p}, DType::f64);
      add_inner_products(sums, x, y);
      add_gram(gram, x);
      EXPECT_EQ(openblas_get_num_threads(), blas);
      products.push_back(sums.to_vector<double>()), squares.push_back(gram.to_vector<double>());
    }
    for (size_t i = 1; i < products.size(); ++i) {
      EXPECT_TRUE(products[i] == products[0]) << tokens << " " << p << " " << q;
      EXPECT_TRUE(squares[i] == squares[0]) << tokens << " " << p;
    }
  }
  set_cpu_threads(threads);
  openblas_set_num_threads(blas_threads);
}

TEST(GemmInnerProducts, KeepWhatIsNotFiniteWhereItBelongs) {
  const Tensor x = drawn({70, 130}, 1), sums = zeros({130, 130}, DType::f64);
  x.slice(0, 69, 70).slice(1, 100, 101).fill(std::numeric_limits<double>::quiet_NaN());
  add_gram(sums, x);
  const std::vector<double> values = sums.to_vector<double>();
  for (int64_t i = 0; i < 130; ++i)
    for (int64_t j = 0; j < 130; ++j)
      EXPECT_EQ(std::isnan(values[size_t(i * 130 + j)]), i == 100 || j == 100) << i << " " << j;
}

TEST(GemmInnerProducts, OfNoTokensAddNothingAndWrongOnesAreRefused) {
  const Tensor sums = drawn({3, 3}, 1);
  const std::vector<double> before = sums.to_vector<double>();
  add_gram(sums, zeros({0, 3}, DType::f64));
  add_inner_products(sums, zeros({0, 3}, DType::f64), zeros({0, 3}, DType::f64));
  EXPECT_EQ(sums.to_vector<double>(), before);
  const auto said = [&](const Tensor& d, const Tensor& x, const Tensor& y) {
    return message_of([&] { add_inner_products(d, x, y); });
  };
  EXPECT_NE(said(sums, drawn({4, 3}, 1), drawn({5, 3}, 1)).find("[tokens, p] and [tokens, q]"),
            std::string::npos);
  EXPECT_NE(said(sums, drawn({4, 2}, 1), drawn({4, 3}, 1)).find("[tokens, p] and [tokens, q]"),
            std::string::npos);
  EXPECT_NE(said(sums, drawn({4, 3}, 1, DType::f32), drawn({4, 3}, 1)).find("expected f64"),
            std::string::npos);
  EXPECT_NE(said(sums, drawn({3, 4}, 1).transpose(0, 1), drawn({4, 3}, 1)).find("rows that are not dense"),
            std::string::npos);
  // In f32 it is multiply.
  const Tensor x = drawn({5, 3}, 1, DType::f32), narrow = zeros({3, 3}, DType::f32);
  add_gram(narrow, x);
  EXPECT_EQ(narrow.to_vector<float>(), oracle(zeros({3, 3}, DType::f32), x, x).to_vector<float>());
}

}  // namespace
}  // namespace tessera::ops
