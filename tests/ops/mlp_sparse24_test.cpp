#include "ops/mlp/mlp_sparse24.h"

#include <gtest/gtest.h>

#include <cmath>
#include <numeric>

#include "autograd/tape.h"
#include "ops/linear/linear_activation.h"
#include "ops/mlp/mlp.h"
#include "ops/mlp/move_columns.h"
#include "ops/random/random.h"
#include "runtime/allocator.h"
#include "tests/errors.h"
#include "tests/ops/expect.h"
#include "tests/ops/tensors.h"

namespace tessera::ops {
namespace {

/// Plain matrices of doubles: the definition of everything, masks and all.
struct Matrix {
  int64_t rows = 0, columns = 0;
  std::vector<double> at;

  Matrix(int64_t r, int64_t c) : rows(r), columns(c), at(size_t(r * c)) {}
  explicit Matrix(const Tensor& x) : Matrix(x.size(0), x.size(1)) { at = values(x); }
  double& operator()(int64_t r, int64_t c) { return at[size_t(r * columns + c)]; }
  double operator()(int64_t r, int64_t c) const { return at[size_t(r * columns + c)]; }
};

Matrix product(const Matrix& a, const Matrix& b) {
  Matrix d(a.rows, b.columns);
  for (int64_t i = 0; i < a.rows; ++i)
    for (int64_t k = 0; k < a.columns; ++k)
      for (int64_t j = 0; j < b.columns; ++j) d(i, j) += a(i, k) * b(k, j);
  return d;
}
Matrix transposed(const Matrix& a) {
  Matrix d(a.columns, a.rows);
  for (int64_t i = 0; i < a.rows; ++i)
    for (int64_t j = 0; j < a.columns; ++j) d(j, i) = a(i, j);
  return d;
}
Matrix masked(Matrix a, const std::vector<bool>& keeps) {
  for (size_t i = 0; i < a.at.size(); ++i)
    if (!keeps[i]) a.at[i] = 0;
  return a;
}

/// Which elements of `a` are among the two largest of four neighbours along rows (or columns, in `order`).
std::vector<bool> two_of_four(const Matrix& a, bool along_rows, const std::vector<int64_t>& order = {}) {
  std::vector<bool> keeps(a.at.size(), false);
  const int64_t outer = along_rows ? a.rows : a.columns, inner = along_rows ? a.columns : a.rows;
  const auto place = [&](int64_t o, int64_t i) {
    const int64_t k = !along_rows && !order.empty() ? order[size_t(i)] : i;
    return size_t(along_rows ? o * a.columns + k : k * a.columns + o);
  };
  for (int64_t o = 0; o < outer; ++o)
    for (int64_t first = 0; first < inner; first += 4) {
      std::vector<size_t> group;
      for (int64_t i = first; i < std::min(inner, first + 4); ++i) group.push_back(place(o, i));
      std::stable_sort(group.begin(), group.end(),
                       [&](size_t l, size_t r) { return std::abs(a.at[l]) > std::abs(a.at[r]); });
      for (size_t i = 0; i < std::min<size_t>(2, group.size()); ++i) keeps[group[i]] = true;
    }
  return keeps;
}

struct Inputs {
  Tensor x, up, down, up_bias, down_bias, residual, dy;
};
Inputs inputs_of(int64_t tokens, int64_t in, int64_t hidden, int64_t out, DType dtype = DType::f64) {
  return {normal({tokens, in}, 1, dtype), normal({hidden, in}, 2, dtype), normal({out, hidden}, 3, dtype),
          normal({hidden}, 4, dtype),     normal({out}, 5, dtype),        normal({tokens, out}, 6, dtype),
          normal({tokens, out}, 7, dtype)};
}

struct MlpResults {
  Tensor y, counts, dx, dup, ddown, dup_bias, ddown_bias, dresidual, l1;
};
/// The gradient of l1, of the size of the others' once it is shared out over the elements.
constexpr double kGradientOfL1 = 300;
MlpResults run_mlp(const Inputs& in, const MlpSparse24& how) {
  Tensor x = in.x.clone(), up = in.up.clone(), down = in.down.clone(), up_bias = in.up_bias.clone(),
         down_bias = in.down_bias.clone(), residual = in.residual.clone();
  for (Tensor* const leaf : {&x, &up, &down, &up_bias, &down_bias, &residual}) require_grad(*leaf);
  Tape tape;
  const MlpSparse24Result result = mlp_sparse24(x, up, down, how, up_bias, down_bias, residual);
  std::vector<Tensor> results{result.y}, grads{in.dy};
  if (how.l1) {
    results.push_back(result.l1);
    grads.push_back(Tensor::full({}, kGradientOfL1, result.l1.dtype(), Device::cpu()));
  }
  tape.backward(results, grads);
  return {result.y.detach(), result.counts,   grad(x),        grad(up),          grad(down),
          grad(up_bias),     grad(down_bias), grad(residual), result.l1.detach()};
}

/// Masked dense GEMMs: what the operator must be. `densest`: which columns split GEMMs leave alone.
struct ExpectedMlp {
  Matrix y, dx, dup, ddown;
  std::vector<double> dup_bias;
  double l1 = 0;
};
ExpectedMlp mlp_by_definition(const Inputs& in, const MlpSparse24& how, const std::vector<bool>& densest,
                              const std::vector<int64_t>& order) {
  const int64_t tokens = in.x.size(0), hidden = in.up.size(0);
  Matrix h = product(Matrix(in.x), transposed(Matrix(in.up)));
  const std::vector<double> up_bias = values(in.up_bias), down_bias = values(in.down_bias);
  Matrix a(tokens, hidden);
  const bool squared = how.activation == Activation::relu_squared;
  for (int64_t t = 0; t < tokens; ++t)
    for (int64_t f = 0; f < hidden; ++f) {
      h(t, f) += up_bias[size_t(f)];
      const double positive = std::max(0.0, h(t, f));
      a(t, f) = squared ? positive * positive : positive;
    }
  const auto restricted = [&](Gemm24 form, const Matrix& by, bool along_rows) {
    if (form == Gemm24::dense) return std::vector<bool>(by.at.size(), true);
    Matrix rest = by;
    for (int64_t t = 0; t < tokens; ++t)
      for (int64_t f = 0; f < hidden; ++f)
        if (form == Gemm24::split && densest[size_t(f)]) rest(t, f) = 0;
    std::vector<bool> keeps = two_of_four(rest, along_rows, order);
    for (size_t i = 0; i < keeps.size(); ++i)
      if (form == Gemm24::split && densest[i % size_t(hidden)]) keeps[i] = true;
    return keeps;
  };
  const Matrix kept = masked(a, restricted(how.y, a, true));
  ExpectedMlp expected{
      product(kept, transposed(Matrix(in.down))), Matrix(0, 0), Matrix(0, 0), Matrix(0, 0), {}};
  for (const double value : kept.at) expected.l1 += std::abs(value) / double(tokens * hidden);
  const std::vector<double> residual = values(in.residual);
  for (size_t i = 0; i < expected.y.at.size(); ++i)
    expected.y.at[i] += residual[i] + down_bias[i % down_bias.size()];
  Matrix dh = product(Matrix(in.dy), Matrix(in.down));
  for (double& value : dh.at) value += how.l1 ? kGradientOfL1 / double(tokens * hidden) : 0;
  const Matrix& by = how.masks_gradient ? kept : a;
  for (size_t i = 0; i < dh.at.size(); ++i)
    dh.at[i] *= by.at[i] == 0 ? 0 : squared ? 2 * std::sqrt(by.at[i]) : 1;
  const Matrix dh_of_dx = masked(dh, restricted(how.dx, kept, true));
  expected.dx = product(dh_of_dx, Matrix(in.up));
  const Matrix x(in.x), dy(in.dy);
  expected.dup = product(transposed(masked(dh, restricted(how.dup, kept, false))), x);
  expected.ddown = product(transposed(dy), masked(kept, restricted(how.ddown, kept, false)));
  expected.dup_bias.assign(size_t(hidden), 0);
  for (int64_t t = 0; t < tokens; ++t)
    for (int64_t f = 0; f < hidden; ++f) expected.dup_bias[size_t(f)] += dh(t, f);
  return expected;
}

void expect_near_values(const Tensor& actual, const std::vector<double>& expected, const std::string& what,
                        double tolerance = 1e-9) {
  const std::vector<double> list = values(actual);
  ASSERT_EQ(list.size(), expected.size()) << what;
  double most = 1, off = 0;
  for (size_t i = 0; i < list.size(); ++i) {
    most = std::max(most, std::abs(expected[i]));
    off = std::max(off, std::abs(list[i] - expected[i]));
  }
  EXPECT_LE(off, tolerance * most) << what;
}

std::string text_of_settings(const MlpSparse24& how) {
  return std::string(name_of(how.activation)) + " y " + name_of(how.y) + " dx " + name_of(how.dx) + " dup " +
         name_of(how.dup) + " ddown " + name_of(how.ddown) + (how.masks_gradient ? "" : " unmasked");
}

TEST(MlpSparse24, IsMaskedDenseGemmsInEveryCombinationOfForms) {
  constexpr Gemm24 kForms[] = {Gemm24::dense, Gemm24::sparse, Gemm24::split};
  const int64_t tokens = 22, hidden = 27;  // groups at both edges are incomplete
  const Inputs in = inputs_of(tokens, 9, hidden, 6);
  Tensor previous = Tensor::zeros({hidden}, DType::i32, Device::cpu());
  std::vector<bool> densest(size_t(hidden), false);
  for (const int column : {2, 3, 11, 26})
    previous.data<int32_t>()[column] = 5 + column, densest[size_t(column)] = true;
  for (int i = 0; i < 81; ++i)
    for (const bool masks : {true, false}) {
      MlpSparse24 how{.activation = i % 2 ? Activation::relu : Activation::relu_squared,
                      .y = kForms[i % 3],
                      .dx = kForms[i / 3 % 3],
                      .dup = kForms[i / 9 % 3],
                      .ddown = kForms[i / 27],
                      .dense_share = 4.0 / double(hidden),
                      .masks_gradient = masks,
                      .previous = previous,
                      .l1 = i % 4 != 0};
      const MlpResults results = run_mlp(in, how);
      const ExpectedMlp expected = mlp_by_definition(in, how, densest, {});
      const std::string what = text_of_settings(how);
      expect_near_values(results.y, expected.y.at, what + ": y");
      expect_near_values(results.dx, expected.dx.at, what + ": dx");
      expect_near_values(results.dup, expected.dup.at, what + ": dup");
      expect_near_values(results.ddown, expected.ddown.at, what + ": ddown");
      expect_near_values(results.dup_bias, expected.dup_bias, what + ": dup_bias");
      expect_near_values(results.dresidual, values(in.dy), what + ": dresidual");
      EXPECT_EQ(results.l1.defined(), how.l1);
      if (how.l1) expect_near_values(results.l1, {expected.l1}, what + ": l1");
    }
}

TEST(MlpSparse24, LossesMayNeedTheMeanMagnitudeAlone) {
  // y is not part of the loss; the compressed backward pass and the one by matrices agree with zeros for dy.
  for (const bool compressed : {true, false}) {
    Inputs in = inputs_of(10, 7, 16, 5);
    const Gemm24 form = compressed ? Gemm24::sparse : Gemm24::dense;
    const MlpSparse24 how{.y = form, .dx = form, .dup = form, .ddown = form, .l1 = true};
    Tensor x = in.x.clone(), up = in.up.clone(), down = in.down.clone(), residual = in.residual.clone();
    for (Tensor* const leaf : {&x, &up, &down, &residual}) require_grad(*leaf);
    {
      Tape tape;
      const MlpSparse24Result result = mlp_sparse24(x, up, down, how, {}, in.down_bias, residual);
      const std::vector<Tensor> of{result.l1}, grads{Tensor::full({}, 2, DType::f64, Device::cpu())};
      tape.backward(of, grads);
    }
    EXPECT_FALSE(grad(residual).defined());
    in.up_bias.fill(0), in.dy.fill(0);
    Tensor all = in.x.clone(), weight = in.up.clone();
    for (Tensor* const leaf : {&all, &weight}) require_grad(*leaf);
    Tape tape;
    const MlpSparse24Result result = mlp_sparse24(all, weight, in.down, how, {}, in.down_bias, in.residual);
    const std::vector<Tensor> of{result.y, result.l1},
        grads{in.dy, Tensor::full({}, 2, DType::f64, Device::cpu())};
    tape.backward(of, grads);
    expect_near_values(grad(x), values(grad(all)), "dx", 1e-12);
    expect_near_values(grad(up), values(grad(weight)), "dup", 1e-12);
    ExpectedMlp exact = mlp_by_definition(in, how, std::vector<bool>(16, false), {});
    for (Matrix* const matrix : {&exact.dx, &exact.dup})
      for (double& value : matrix->at) value *= 2 / kGradientOfL1;
    expect_near_values(grad(x), exact.dx.at, "dx by definition", 1e-12);
    expect_near_values(grad(up), exact.dup.at, "dup by definition", 1e-12);
  }
}

TEST(MlpSparse24, TheMeanMagnitudeIsNotRoundedTo16Bits) {
  // Its share of an element is 300 / (T F): in f16, without a loss scale, below the smallest number.
  const Inputs in = inputs_of(64, 9, 128, 8, DType::f16);
  const MlpSparse24 how{.dense_share = 0.1, .l1 = true};
  const MlpResults results = run_mlp(in, how);
  EXPECT_EQ(results.l1.dtype(), DType::f32);
  MlpSparse24 exact = how;
  const Inputs wide = inputs_of(64, 9, 128, 8, DType::f32);
  expect_near_values(results.l1, values(run_mlp(wide, exact).l1), "l1", 5e-3);
}

TEST(MlpSparse24, TokensStandTogetherAsTheOrderSays) {
  const int64_t tokens = 26, hidden = 20;
  const Inputs in = inputs_of(tokens, 9, hidden, 6);
  for (const char* const kind : {"random", "stride"}) {
    const Tensor order = token_order24(kind, tokens, 5, Device::cpu());
    std::vector<int64_t> list = order.to_vector<int64_t>();
    std::vector<int64_t> sorted = list, all(size_t(tokens), 0);
    std::iota(all.begin(), all.end(), 0);
    EXPECT_NE(list, all);
    std::sort(sorted.begin(), sorted.end());
    EXPECT_EQ(sorted, all);  // a permutation
    const MlpSparse24 how{.y = Gemm24::sparse,
                          .dx = Gemm24::sparse,
                          .dup = Gemm24::sparse,
                          .ddown = Gemm24::sparse,
                          .order = order};
    const MlpResults results = run_mlp(in, how);
    const ExpectedMlp expected = mlp_by_definition(in, how, std::vector<bool>(size_t(hidden), false), list);
    expect_near_values(results.dup, expected.dup.at, kind);
    expect_near_values(results.ddown, expected.ddown.at, kind);
  }
  const Tensor stride = token_order24("stride", 8, 0, Device::cpu());
  EXPECT_EQ(stride.to_vector<int64_t>(), (std::vector<int64_t>{0, 2, 4, 6, 1, 3, 5, 7}));
}

TEST(MlpSparse24, DenseFormsAreTheDenseLayer) {
  const Inputs in = inputs_of(13, 8, 24, 8);
  const MlpSparse24 how{
      .y = Gemm24::dense, .dx = Gemm24::dense, .dup = Gemm24::dense, .ddown = Gemm24::dense};
  const MlpResults results = run_mlp(in, how);
  Tensor x = in.x.clone(), up = in.up.clone(), down = in.down.clone();
  for (Tensor* const leaf : {&x, &up, &down}) require_grad(*leaf);
  Tape tape;
  const Tensor y = mlp(x, up, down, Activation::relu_squared, in.up_bias, in.down_bias, in.residual);
  const std::vector<Tensor> of{y}, grads{in.dy};
  tape.backward(of, grads);
  expect_near_values(results.y, values(y), "y");
  expect_near_values(results.dx, values(grad(x)), "dx");
  expect_near_values(results.dup, values(grad(up)), "dup");
  expect_near_values(results.ddown, values(grad(down)), "ddown");
}

TEST(MlpSparse24, CountsAreThoseOfTheActivationsBeforeAnyAreDropped) {
  const Inputs in = inputs_of(30, 9, 23, 6);
  const MlpSparse24 how{.dense_share = 0.2};
  const MlpResults results = run_mlp(in, how);
  const ActivatedLinear hidden = linear_activation(in.x, in.up, Activation::relu_squared, in.up_bias);
  EXPECT_EQ(results.counts.to_vector<int64_t>(), hidden.counts.to_vector<int64_t>());
  const std::vector<double> a = values(hidden.y);
  std::vector<int64_t> counted(23, 0);
  for (size_t i = 0; i < a.size(); ++i) counted[i % 23] += a[i] != 0;
  EXPECT_EQ(results.counts.to_vector<int64_t>(), counted);
}

TEST(MlpSparse24, MeanOverDrawsIsTheDenseResult) {
  // y is linear in what mvue keeps, so its mean over many draws tends to the dense y; the same holds for both
  // gradients of weights. 4,000 draws leave some 1.6 % of a standard deviation.
  const Inputs in = inputs_of(8, 6, 12, 5);
  Rng rng(3);
  const MlpSparse24 dense{
      .y = Gemm24::dense, .dx = Gemm24::dense, .dup = Gemm24::dense, .ddown = Gemm24::dense};
  MlpSparse24 how{.y = Gemm24::sparse,
                  .dx = Gemm24::sparse,
                  .dup = Gemm24::sparse,
                  .ddown = Gemm24::sparse,
                  .method = Method24::mvue,
                  .token_method = Method24::mvue,
                  .rng = rng};
  constexpr int kDraws = 4000;
  const MlpResults exact = run_mlp(in, dense);
  std::vector<std::vector<double>> sums(4), squares(4);
  const auto parts = [](const MlpResults& r) { return std::array{r.y, r.dx, r.dup, r.ddown}; };
  for (int draw = 0; draw < kDraws; ++draw) {
    const auto all = parts(run_mlp(in, how));
    for (size_t p = 0; p < 4; ++p) {
      const std::vector<double> list = values(all[p]);
      sums[p].resize(list.size()), squares[p].resize(list.size());
      for (size_t i = 0; i < list.size(); ++i) sums[p][i] += list[i], squares[p][i] += list[i] * list[i];
    }
  }
  const auto expected = parts(exact);
  for (size_t p = 0; p < 4; ++p) {
    const std::vector<double> wanted = values(expected[p]);
    for (size_t i = 0; i < wanted.size(); ++i) {
      const double mean = sums[p][i] / kDraws;
      const double deviation = std::sqrt(std::max(0.0, squares[p][i] / kDraws - mean * mean) / kDraws);
      EXPECT_LE(std::abs(mean - wanted[i]), 4.5 * deviation + 1e-9) << p << " " << i;
    }
  }
}

TEST(MlpSparse24, SoftMethodsDifferentiateWhatTheyKeep) {
  // Against central differences of y with what is kept, and the thresholds, held: those of x_i alone.
  const Inputs in = inputs_of(3, 4, 8, 5);
  MlpSparse24 how{.y = Gemm24::sparse,
                  .dx = Gemm24::sparse,
                  .dup = Gemm24::dense,
                  .ddown = Gemm24::dense,
                  .method = Method24::soft_threshold,
                  .scale = Tensor::full({1}, 1.5, DType::f32, Device::cpu())};
  const MlpResults results = run_mlp(in, how);
  const Matrix x(in.x), up(in.up), down(in.down), dy(in.dy);
  const std::vector<double> bias = values(in.up_bias);
  Matrix a(3, 8);
  for (int64_t t = 0; t < 3; ++t)
    for (int64_t f = 0; f < 8; ++f) {
      double h = bias[size_t(f)];
      for (int64_t k = 0; k < 4; ++k) h += x(t, k) * up(f, k);
      a(t, f) = h > 0 ? h * h : 0;
    }
  const std::vector<bool> keeps = two_of_four(a, true);
  const Matrix da = product(dy, down);
  Matrix dh(3, 8), kept(3, 8);
  for (int64_t t = 0; t < 3; ++t)
    for (int64_t f = 0; f < 8; ++f) {
      std::vector<double> group;
      for (int64_t k = f / 4 * 4; k < f / 4 * 4 + 4; ++k) group.push_back(a(t, k));
      std::sort(group.begin(), group.end(), std::greater<>());
      if (!keeps[size_t(t * 8 + f)]) continue;
      kept(t, f) = 1.5 * (a(t, f) - group[2]);
      dh(t, f) = kept(t, f) == 0 ? 0 : da(t, f) * 1.5 * 2 * std::sqrt(a(t, f));
    }
  expect_near_values(results.dx, product(dh, up).at, "dx", 1e-6);
  expect_near_values(results.dup, product(transposed(dh), x).at, "dup", 1e-6);
  expect_near_values(results.ddown, product(transposed(dy), kept).at, "ddown", 1e-6);
}

TEST(MlpSparse24, SavesTheCompressedActivationsAlone) {
  // f16, F = 16 D: x and what is compressed. The dense layer saves h and a; the dense one a alone.
  const int64_t tokens = 512, hidden = 1024;
  const Inputs in = inputs_of(tokens, 16, hidden, 16, DType::f16);
  const auto saved = [&](const MlpSparse24& how) {
    Tensor up = in.up.clone(), down = in.down.clone();
    require_grad(up), require_grad(down);
    const uint64_t before = Device::cpu().allocator().stats().allocated;
    Tape tape;
    const MlpSparse24Result result = mlp_sparse24(in.x, up, down, how);
    return double(Device::cpu().allocator().stats().allocated - before) - double(result.y.count() * 2);
  };
  const double elements = double(tokens * hidden);
  const MlpSparse24 sparse{
      .y = Gemm24::sparse, .dx = Gemm24::sparse, .dup = Gemm24::sparse, .ddown = Gemm24::sparse};
  EXPECT_LE(saved(sparse), 1.125 * elements + 16 * 1024);
  EXPECT_LE(saved(MlpSparse24{}), 0.62 * 2 * elements + 32 * 1024);  // 5 % of the columns dense
}

TEST(MlpSparse24, RepeatsItsBitsAndTheFirstColumnsAreDenseWithoutCounts) {
  const Inputs in = inputs_of(64, 24, 72, 16, DType::f32);
  const MlpResults once = run_mlp(in, {}), again = run_mlp(in, {});
  EXPECT_EQ(values(once.dup), values(again.dup));
  EXPECT_EQ(values(once.y), values(again.y));
  Tensor previous = Tensor::zeros({72}, DType::i32, Device::cpu());
  for (int i = 0; i < 3; ++i) previous.data<int32_t>()[i] = 1;  // 5 % of 72 are 3 columns
  EXPECT_EQ(values(once.y), values(run_mlp(in, {.previous = previous}).y));
  previous.data<int32_t>()[70] = 9;
  EXPECT_NE(values(once.y), values(run_mlp(in, {.previous = previous}).y));
}

TEST(MlpSparse24, WithoutABiasGradientTheHiddenGradientStaysCompressedToTheSameBits) {
  const Inputs in = inputs_of(46, 20, 72, 16, DType::f32);
  for (const Gemm24 form : {Gemm24::sparse, Gemm24::split})
    for (const Activation kind : {Activation::relu, Activation::relu_squared})
      for (const char* const order : {"", "stride"}) {
        MlpSparse24 how{.activation = kind, .y = form, .dx = form, .dup = form, .ddown = form};
        if (*order) how.order = token_order24(order, 46, 0, Device::cpu());
        const MlpResults whole = run_mlp(in, how);
        Tensor x = in.x.clone(), up = in.up.clone(), down = in.down.clone();
        for (Tensor* const leaf : {&x, &up, &down}) require_grad(*leaf);
        Tape tape;
        const std::vector<Tensor> y{mlp_sparse24(x, up, down, how, in.up_bias, in.down_bias, in.residual).y},
            dy{in.dy};
        tape.backward(y, dy);
        EXPECT_EQ(values(grad(x)), values(whole.dx));
        EXPECT_EQ(values(grad(up)), values(whole.dup));
        EXPECT_EQ(values(grad(down)), values(whole.ddown));
      }
}

TEST(MlpSparse24, AcceptsNothing) {
  for (const auto& [tokens, hidden] : {std::pair{0, 8}, {5, 0}, {1, 1}}) {
    const MlpResults results = run_mlp(inputs_of(tokens, 3, hidden, 4), {.dense_share = 0.5});
    EXPECT_EQ(results.dup.shape(), (Shape{hidden, 3}));
    EXPECT_EQ(results.ddown.shape(), (Shape{4, hidden}));
    EXPECT_EQ(results.y.shape(), (Shape{tokens, 4}));
  }
}

TEST(MlpSparse24, SaysWhatIsWrong) {
  const Inputs in = inputs_of(8, 4, 8, 4);
  const auto message = [&](const MlpSparse24& how) {
    return message_of([&] { mlp_sparse24(in.x, in.up, in.down, how); });
  };
  EXPECT_EQ(message({.activation = Activation::silu}),
            "mlp_sparse24: the activation is silu, whose results are not zero; 2:4 sparsity needs relu or "
            "relu_squared");
  EXPECT_EQ(message({.dense_share = 1.5}), "mlp_sparse24: dense_share is 1.5; expected 0 to 1");
  EXPECT_EQ(message({.dense_share = 0}),
            "mlp_sparse24: dense_share is 0, so there are no columns to split off; make the GEMMs sparse");
  EXPECT_EQ(message({.token_method = Method24::soft_threshold}),
            "mlp_sparse24: token_method is soft_threshold; expected naive, mvue or fast");
  EXPECT_EQ(message({.method = Method24::mvue}),
            "mlp_sparse24: mvue draws random numbers, and there is no generator; set rng");
  EXPECT_EQ(message({.method = Method24::soft_threshold}),
            "mlp_sparse24: soft_threshold needs its scale; soft_scale() fits one to a weight");
  EXPECT_EQ(message({.method = Method24::soft_dynamic}),
            "mlp_sparse24: soft_dynamic needs a DynamicScale24 that lives as long as the training");
  EXPECT_EQ(message({.required = true}),
            "mlp_sparse24: sparse tensor cores are required, but the GEMM of y would run as \"cpu\"; make it "
            "dense, or do not require them");
  EXPECT_EQ(message({.previous = Tensor::zeros({7}, DType::i32, Device::cpu())}),
            "mlp_sparse24: previous is i32[7] on cpu; expected i32 [8], a count per column of up, on cpu");
  EXPECT_EQ(message({.order = Tensor::zeros({7}, DType::i32, Device::cpu())}),
            "mlp_sparse24: order is i32[7] on cpu; expected i32 [8], a place per token, on cpu");
  EXPECT_EQ(message_of([] { token_order24("zigzag", 4, 0, Device::cpu()); }),
            "mlp_sparse24: the order of tokens is \"zigzag\"; expected random or stride");
  EXPECT_EQ(message_of([] { parse_gemm24("half"); }),
            "mlp_sparse24: a GEMM is \"half\"; expected dense, sparse or split");
}

TEST(MoveColumns, TakesClearsAndAdds) {
  const Tensor x = normal({5, 7}, 1, DType::f32), before = x.clone();
  const Tensor indices = Tensor::from(std::vector<int32_t>{1, 4, 6}, {3});
  const Tensor part = Tensor::empty({5, 3}, DType::f32, Device::cpu());
  take_columns(part, x, indices, true);
  for (int64_t r = 0; r < 5; ++r) {
    EXPECT_EQ(part.at({r, 1}).item(), before.at({r, 4}).item());
    EXPECT_EQ(x.at({r, 4}).item(), 0);
    EXPECT_EQ(x.at({r, 5}).item(), before.at({r, 5}).item());
  }
  add_columns(x, part, indices);
  EXPECT_EQ(values(x), values(before));
}

TEST(LinearActivation, CountsWhatIsStored) {
  // 2^-5 squared is 2^-10; 2^-13 squared underflows f16 to 0. A NaN counts, -0 does not, and a bias does not
  // make rows that do not exist.
  const Tensor x =
      Tensor::from(std::vector<double>{std::ldexp(1, -5), std::ldexp(1, -13), -1.0, kNan}, {4, 1})
          .to(DType::f16);
  const Tensor weight = Tensor::full({1, 1}, 1, DType::f16, Device::cpu());
  for (const Device device : devices()) {
    const ActivatedLinear result =
        linear_activation(x.to(device), weight.to(device), Activation::relu_squared);
    EXPECT_EQ(result.counts.to_vector<int64_t>(), std::vector<int64_t>{2}) << device.name();
    const Tensor zeros = Tensor::from(std::vector<float>{-0.0f, 0.0f, 1.0f}, {3, 1}, device);
    EXPECT_EQ(column_counts(zeros).to_vector<int64_t>(), std::vector<int64_t>{1});
  }
}

TEST(LinearActivation, CountsItsOwnResultOnEveryDeviceAndTileEdge) {
  for (const Device device : devices())
    for (const DType dtype : {DType::f32, DType::bf16, DType::f16})
      for (const auto& [tokens, in, out] :
           {std::tuple{700, 136, 345}, {64, 64, 128}, {129, 40, 8}, {3000, 24, 520}})
        for (const Activation kind : {Activation::none, Activation::relu, Activation::relu_squared}) {
          const ActivatedLinear result = linear_activation(normal({tokens, in}, 1, dtype).to(device),
                                                           normal({out, in}, 2, dtype).to(device), kind,
                                                           normal({out}, 3, dtype).to(device));
          EXPECT_EQ(result.counts.to_vector<int64_t>(),
                    column_counts(result.y.to(Device::cpu())).to_vector<int64_t>())
              << device.name() << " " << name_of(dtype) << " " << tokens << " " << name_of(kind);
        }
}

TEST(LinearActivation, SaysWhatIsWrong) {
  const Tensor x = normal({2, 3}, 1), weight = normal({4, 3}, 2);
  EXPECT_EQ(message_of([&] { linear_activation(x, weight, Activation::gelu); }),
            "linear_activation: the activation is gelu; expected none, relu or relu_squared");
  EXPECT_EQ(message_of([&] {
              linear_activation(x, normal({4, 2}, 2), Activation::relu);
            }),
            "linear_activation: weight [4, 2] takes 2 features, but its input has 3; expected [out, 3]");
  EXPECT_EQ(message_of([&] { column_counts(Tensor::zeros({2}, DType::i32, Device::cpu())); }),
            "column_counts: x is i32[2] on cpu; expected a floating tensor [..., C]");
  EXPECT_EQ(message_of([&] { column_counts(Tensor::zeros({}, DType::f32, Device::cpu())); }),
            "column_counts: x is a scalar; expected [..., C]");
}

TEST(ColumnCounts, AreThoseOfEachColumn) {
  const std::vector<float> values = {1, 0, 2, -0.0f, 0, 0, 3, 4, 0, 5, 0, NAN};
  const Tensor x = Tensor::from(values, {3, 4}, Device::cpu());
  EXPECT_EQ(column_counts(x).to_vector<int64_t>(), (std::vector<int64_t>{1, 1, 2, 2}));
  EXPECT_EQ(column_counts(x.transpose(0, 1)).to_vector<int64_t>(), (std::vector<int64_t>{2, 2, 2}));
}

}  // namespace
}  // namespace tessera::ops
