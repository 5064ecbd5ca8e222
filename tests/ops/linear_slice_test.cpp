#include "ops/linear/sliced_backward.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>

#include "autograd/checkpoint.h"
#include "ops/linear/linear.h"
#include "ops/linear/linear_swiglu.h"
#include "ops/mlp/mlp.h"
#include "ops/pointwise/pointwise.h"
#include "ops/random/random.h"
#include "ops/shape/shape.h"
#include "runtime/allocator.h"
#include "runtime/capture.h"
#include "tests/errors.h"
#include "tests/ops/expect.h"
#include "tests/ops/tensors.h"

namespace tessera::ops {
namespace {

constexpr SelectMode kModes[] = {SelectMode::first, SelectMode::top_norm, SelectMode::threshold,
                                 SelectMode::random, SelectMode::importance};
constexpr WeightGrad kKinds[] = {WeightGrad::none, WeightGrad::slice, WeightGrad::full};

/// The sliced operators alike: inputs, which of them are weights and biases, and a call; without a slice the
/// dense operator.
struct Operator {
  const char* name;
  std::vector<Tensor> inputs;
  std::vector<size_t> weights;
  int64_t out;
  std::function<Tensor(const std::vector<Tensor>&, const SlicedBackward*)> run;

  int64_t rows() const { return inputs[0].size(0); }
};

Operator linear_operator(int64_t rows, DType dtype = DType::f64) {
  return {"linear",
          {normal({rows, 5}, 1, dtype), normal({4, 5}, 2, dtype), normal({4}, 3, dtype),
           normal({rows, 4}, 4, dtype)},
          {1},
          4,
          [](const std::vector<Tensor>& in, const SlicedBackward* slice) {
            return slice ? linear(in[0], in[1], in[2], in[3], *slice) : linear(in[0], in[1], in[2], in[3]);
          }};
}

Operator mlp_operator(int64_t rows, DType dtype = DType::f64) {
  return {"mlp",
          {normal({rows, 5}, 1, dtype), normal({7, 5}, 2, dtype), normal({4, 7}, 3, dtype),
           normal({7}, 4, dtype), normal({4}, 5, dtype), normal({rows, 4}, 6, dtype)},
          {1, 2},
          4,
          [](const std::vector<Tensor>& in, const SlicedBackward* slice) {
            const Activation kind = Activation::gelu;
            return slice ? mlp(in[0], in[1], in[2], kind, in[3], in[4], in[5], *slice)
                         : mlp(in[0], in[1], in[2], kind, in[3], in[4], in[5]);
          }};
}

Operator swiglu_operator(int64_t rows, DType dtype = DType::f64) {
  return {"linear_swiglu",
          {normal({rows, 5}, 1, dtype), normal({8, 5}, 2, dtype)},
          {1},
          4,
          [](const std::vector<Tensor>& in, const SlicedBackward* slice) {
            return slice ? linear_swiglu(in[0], in[1], *slice) : linear_swiglu(in[0], in[1]);
          }};
}

std::vector<Operator> all_operators(int64_t rows, DType dtype = DType::f64) {
  return {linear_operator(rows, dtype), mlp_operator(rows, dtype), swiglu_operator(rows, dtype)};
}

/// The gradients of all inputs that `wanted` names (all of them if it is empty); undefined where none came.
std::vector<Tensor> gradients(const Operator& op, const Tensor& dy, const SlicedBackward* slice,
                              const std::vector<bool>& wanted = {}) {
  std::vector<Tensor> in;
  for (size_t i = 0; i < op.inputs.size(); ++i) {
    in.push_back(op.inputs[i].detach());
    if (wanted.empty() || wanted[i]) require_grad(in.back());
  }
  Tape tape;
  tape.backward(std::vector{op.run(in, slice)}, std::vector{dy});
  std::vector<Tensor> grads;
  for (const Tensor& each : in) grads.push_back(requires_grad(each) ? grad(each) : Tensor());
  return grads;
}

/// A choice that is made already.
std::shared_ptr<SharedRows> fixed(int64_t rows, const std::vector<int32_t>& indices,
                                  const std::vector<float>& scales) {
  auto shared = std::make_shared<SharedRows>();
  const auto count = int64_t(indices.size());
  shared->selection = {.indices = Tensor::from(indices, {count}),
                       .scales = Tensor::from(scales, {count}),
                       .count = Tensor::from(std::vector<int32_t>{int32_t(count)}, {1}),
                       .rows = rows};
  return shared;
}

/// diag(s) dy
Tensor scaled_rows(const Tensor& dy, const std::vector<int32_t>& indices, const std::vector<float>& scales) {
  std::vector<double> factors(size_t(dy.size(0)), 0.0);
  for (size_t n = 0; n < indices.size(); ++n) factors[size_t(indices[n])] = scales[n];
  return mul(dy, Tensor::from(factors, {dy.size(0), 1}));
}

void expect_near_if_defined(const Tensor& a, const Tensor& b, double tolerance, const std::string& what) {
  ASSERT_EQ(a.defined(), b.defined()) << what;
  const auto x = values_if_defined(a), y = values_if_defined(b);
  ASSERT_EQ(x.size(), y.size()) << what;
  for (size_t i = 0; i < x.size(); ++i) EXPECT_NEAR(x[i], y[i], tolerance) << what << " element " << i;
}

SlicedBackward slice_of(SelectMode mode, WeightGrad kind, int64_t n, Rng& rng) {
  SlicedBackward slice{.rows = mode, .weight_grad = kind, .rng = rng};
  if (mode == SelectMode::threshold)
    slice.threshold = 1.8;
  else
    slice.n = n;
  return slice;
}

// ---- what is computed ----

// Central differences of sum_i s_i <dy_i, y_i>, whose slope the sliced gradients are; for `full` and for
// biases that see all rows, of the sum without the scales.
TEST(LinearSlice, GradientsAreTheSlopesOfTheScaledSum) {
  const std::vector<int32_t> indices{1, 2, 5};
  const std::vector<float> scales{2, 0.5, 3};
  Rng rng(7);
  for (const Operator& op : all_operators(6))
    for (const SelectMode mode : {SelectMode::random, SelectMode::importance})
      for (const WeightGrad kind : {WeightGrad::slice, WeightGrad::full}) {
        const Tensor dy = normal({6, op.out}, 9), chosen = scaled_rows(dy, indices, scales);
        SlicedBackward slice = slice_of(mode, kind, 3, rng);
        slice.shared = fixed(6, indices, scales);
        const auto grads = gradients(op, dy, &slice);
        const std::string name = op.name;
        for (size_t i = 0; i < op.inputs.size(); ++i) {
          const bool is_last_weight = i == op.weights.back(),
                     is_residual = i + 1 == op.inputs.size() && i > 2;
          const bool is_last_bias = (name == "linear" && i == 2) || (name == "mlp" && i == 4);
          const bool all = is_last_bias || is_residual || (is_last_weight && kind == WeightGrad::full);
          const Tensor& weights = all ? dy : chosen;
          for (int64_t at = 0; at < op.inputs[i].count(); at += 3) {
            const double step = 1e-5;
            const auto sum_at = [&](double by) {
              auto in = op.inputs;
              auto numbers = values_if_defined(in[i]);
              numbers[size_t(at)] += by;
              in[i] = Tensor::from(numbers, in[i].shape());
              double sum = 0;
              for (const double term : values_if_defined(mul(op.run(in, nullptr), weights))) sum += term;
              return sum;
            };
            EXPECT_NEAR(values_if_defined(grads[i])[size_t(at)], (sum_at(step) - sum_at(-step)) / (2 * step),
                        1e-7)
                << name << " " << name_of(mode) << " " << name_of(kind) << " input " << i << " element "
                << at;
          }
        }
      }
}

// Of the rows that each mode chooses by itself.
TEST(LinearSlice, IsTheDenseBackwardPassOfTheChosenRows) {
  for (const Operator& op : all_operators(9))
    for (const SelectMode mode : kModes)
      for (const WeightGrad kind : kKinds) {
        Rng rng(5), same(5);
        const Tensor dy = normal({9, op.out}, 8);
        const SlicedBackward slice = slice_of(mode, kind, 4, rng);
        const Tensor norms = row_norms(dy);
        const Selection chosen = mode == SelectMode::first       ? Selection::first(9, 4, Device::cpu())
                                 : mode == SelectMode::top_norm  ? Selection::top_norm(norms, 4)
                                 : mode == SelectMode::threshold ? Selection::threshold(norms, 1.8)
                                 : mode == SelectMode::random ? Selection::random(9, 4, same, Device::cpu())
                                                              : Selection::importance(norms, 4, same);
        auto indices = chosen.indices.to_vector<int32_t>();
        auto scales = chosen.scales.to_vector<float>();
        const auto count = size_t(chosen.count.item<int32_t>());
        ASSERT_GT(count, 0u);
        ASSERT_LT(count, 9u);
        indices.resize(count), scales.resize(count);
        const auto sliced = gradients(op, dy, &slice), all = gradients(op, dy, nullptr);
        const auto some = gradients(op, scaled_rows(dy, indices, scales), nullptr);
        const std::string name = op.name, what = name + " " + to_string(slice) + " input ";
        for (size_t i = 0; i < sliced.size(); ++i) {
          const bool is_weight = i == 1 || (name == "mlp" && i == 2);
          const bool sums_all = is_weight ? i == op.weights.back() && kind == WeightGrad::full
                                          : i != 0 && !(name == "mlp" && i == 3);
          const Tensor none;
          const Tensor& expected = is_weight && kind == WeightGrad::none ? none : sums_all ? all[i] : some[i];
          expect_near_if_defined(sliced[i], expected, 1e-12, what + std::to_string(i));
        }
        // The rows that were not chosen get exact zeros.
        const auto dx = values_if_defined(sliced[0]);
        for (int64_t row = 0, n = 0; row < 9; ++row) {
          const bool is_chosen = n < int64_t(count) && indices[size_t(n)] == row;
          n += is_chosen;
          for (int64_t c = 0; c < 5; ++c) EXPECT_EQ(dx[size_t(row * 5 + c)] != 0, is_chosen) << what << row;
        }
      }
}

TEST(LinearSlice, OfAllRowsIsBitwiseTheDensePass) {
  for (const DType dtype : {DType::f64, DType::f32, DType::bf16, DType::f16})
    for (const Operator& op : all_operators(6, dtype))
      for (const SelectMode mode : kModes)
        for (const WeightGrad kind : kKinds)
          for (const int64_t n : {6, 50}) {  // more rows than there are: all of them
            if (mode == SelectMode::threshold) continue;
            Rng rng(5);
            const Tensor dy = normal({6, op.out}, 8, dtype);
            const SlicedBackward slice = slice_of(mode, kind, n, rng);
            const auto sliced = gradients(op, dy, &slice), dense = gradients(op, dy, nullptr);
            for (size_t i = 0; i < sliced.size(); ++i) {
              const bool is_weight = i == 1 || (op.weights.size() == 2 && i == 2);
              if (is_weight && kind == WeightGrad::none)
                EXPECT_FALSE(sliced[i].defined()) << op.name;
              else
                EXPECT_EQ(values_if_defined(sliced[i]), values_if_defined(dense[i]))
                    << op.name << " " << to_string(slice) << dtype;
            }
          }
}

TEST(LinearSlice, ForwardIsThatOfTheDenseOperator) {
  for (const DType dtype : {DType::f64, DType::bf16})
    for (const Operator& op : all_operators(6, dtype))
      for (const SelectMode mode : kModes) {
        Rng rng(5);
        const SlicedBackward slice = slice_of(mode, WeightGrad::slice, 2, rng);
        EXPECT_EQ(values_if_defined(op.run(op.inputs, &slice)),
                  values_if_defined(op.run(op.inputs, nullptr)));
        EXPECT_EQ(rng.state().offset, 0u) << "nothing is drawn without a tape";
      }
}

TEST(LinearSlice, InputsOfAnyRankAndThoseThatOthersRead) {
  Rng rng(3);
  const Tensor x0 = normal({2, 3, 4}, 1), weight = normal({4, 4}, 2), dy = normal({2, 3, 4}, 3);
  const auto gradient = [&](const SlicedBackward* slice, bool residual, const Tensor& gradient_of_y) {
    Tensor x = x0.detach();
    require_grad(x);
    Tape tape;
    const Tensor before = scale(x, 1);  // a result: its gradient may be added to in place
    const Tensor added = residual ? before : Tensor();
    const Tensor y = slice ? linear(before, weight, {}, added, *slice) : linear(before, weight, {}, added);
    const Tensor other = linear(before, weight);
    tape.backward(std::vector{y, other}, std::vector{gradient_of_y, dy});
    return grad(x);
  };
  for (const bool residual : {false, true}) {
    const Tensor none = gradient(nullptr, residual, scale(dy, 0)), all = gradient(nullptr, residual, dy);
    for (const SelectMode mode : kModes) {
      SlicedBackward slice = slice_of(mode, WeightGrad::slice, 3, rng);
      slice.shared = fixed(6, {0, 1, 2}, {1, 1, 1});
      const auto got = values_if_defined(gradient(&slice, residual, dy)), nothing = values_if_defined(none),
                 dense = values_if_defined(all);
      for (size_t i = 0; i < got.size(); ++i) {
        const double own = residual && i >= 12 ? values_if_defined(dy)[i] : 0;
        EXPECT_NEAR(got[i], i < 12 ? dense[i] : nothing[i] + own, 1e-12)
            << name_of(mode) << residual << " element " << i;
      }
    }
  }
}

// Of all rows too, which no mode gathers.
TEST(LinearSlice, RowsOfAnyRankAreThoseOfTheMatrix) {
  for (const Operator& op : all_operators(6))
    for (const SelectMode mode : kModes)
      for (const WeightGrad kind : kKinds)
        for (const int64_t n : {3, 6}) {
          const auto gradients_of = [&](const Shape& leading) {
            Operator other = op;
            for (Tensor& input : other.inputs)  // x and the residual; no weight has 6 rows
              if (input.rank() == 2 && input.size(0) == 6)
                input = input.reshape(leading.inserted(leading.rank(), input.size(1)));
            const Tensor dy = normal({6, op.out}, 8).reshape(leading.inserted(leading.rank(), op.out));
            Rng rng(5);
            const SlicedBackward slice = slice_of(mode, kind, n, rng);
            return gradients(other, dy, &slice);
          };
          const auto matrix = gradients_of({6}), batch = gradients_of({2, 3});
          for (size_t i = 0; i < matrix.size(); ++i)
            EXPECT_EQ(values_if_defined(batch[i]), values_if_defined(matrix[i]))
                << op.name << " " << name_of(mode) << " " << name_of(kind) << " " << n << " input " << i;
        }
}

TEST(LinearSlice, TheMlpsInputMayBeItsResidual) {
  const Tensor x0 = normal({6, 4}, 1), up = normal({7, 4}, 2), down = normal({4, 7}, 3),
               dy = normal({6, 4}, 4);
  const auto gradient = [&](const SlicedBackward* slice, const Tensor& dy_of_branch) {
    Tensor x = x0.detach();
    require_grad(x);
    Tape tape;
    const Tensor before = scale(x, 1);
    const Tensor y = slice ? mlp(before, up, down, Activation::silu, {}, {}, before, *slice)
                           : mlp(before, up, down, Activation::silu);
    tape.backward(std::vector{y}, std::vector{dy_of_branch});
    return grad(x);
  };
  Rng rng(3);
  for (const SelectMode mode : kModes) {
    SlicedBackward slice = slice_of(mode, WeightGrad::slice, 3, rng);
    const std::vector<int32_t> rows{0, 1, 2};
    const std::vector<float> scales{1, 1, 1};
    slice.shared = fixed(6, rows, scales);
    expect_near_if_defined(gradient(&slice, dy), add(gradient(nullptr, scaled_rows(dy, rows, scales)), dy),
                           1e-12, name_of(mode));
  }
}

TEST(LinearSlice, AddsToAGradientThatIsThereOnEveryDevice) {
  const Tensor x0 = normal({300, 71}, 1), weight0 = normal({130, 71}, 2), dy0 = normal({300, 130}, 3);
  for (const Device device : devices())
    for (const DType dtype : {DType::f32, DType::bf16})
      for (const SelectMode mode : kModes) {
        const auto gradient = [&](DType own, Device at) {
          const auto rounded = [&](const Tensor& t) { return t.to(dtype).to(own).to(at); };
          Rng rng(5);
          const Tensor weight = rounded(weight0), dy = rounded(dy0);
          SlicedBackward slice{.rows = mode, .rng = rng};
          mode == SelectMode::threshold ? slice.threshold.emplace(11.5) : slice.share.emplace(0.5);
          return gradient_of(rounded(x0), dy, [&](const Tensor& x) {
            const Tensor before = scale(x, 1);
            return add(linear(before, weight, {}, {}, slice), linear(before, weight));
          });
        };
        const auto got = values_if_defined(gradient(dtype, device)),
                   wanted = values_if_defined(gradient(DType::f64, Device::cpu()));
        double largest = 0;
        for (const double each : wanted) largest = std::max(largest, std::abs(each));
        // Of bf16: dy's rows, rounded after their scale, the gradient that is added to, and the sum.
        const double tolerance = (dtype == DType::bf16 ? 3 * 0x1p-8 : 64 * 0x1p-23) * largest;
        for (size_t i = 0; i < got.size(); ++i)
          ASSERT_NEAR(got[i], wanted[i], tolerance) << device.name() << dtype << name_of(mode) << " " << i;
      }
}

TEST(LinearSlice, EveryReplayOfAGraphDrawsItsOwnRows) {
  if (Device::cuda_count() == 0) GTEST_SKIP() << "skipped: no GPU";
  const Device gpu = Device::cuda();
  for (const SelectMode mode : {SelectMode::random, SelectMode::importance}) {
    Rng rng(5);
    const SlicedBackward slice{.rows = mode, .n = 20, .rng = rng};
    Tensor x = normal({200, 64}, 1, DType::f32).to(gpu);
    const Tensor weight = normal({32, 64}, 2, DType::f32).to(gpu),
                 dy = normal({200, 32}, 3, DType::f32).to(gpu);
    require_grad(x);
    Captured step(gpu, [&] {
      Tape tape;
      tape.backward(std::vector{linear(x, weight, {}, {}, slice)}, std::vector{dy});
      zero_grad(x);
    });
    std::vector<std::vector<double>> all;
    for (int i = 0; i < 6; ++i) {
      step();
      all.push_back(x.grad_state()->grad.to_vector<double>());
      int64_t rows = 0;
      for (int64_t row = 0; row < 200; ++row) rows += all.back()[size_t(row * 64)] != 0;
      EXPECT_EQ(rows, 20) << name_of(mode);
    }
    for (size_t i = 1; i < all.size(); ++i) EXPECT_NE(all[i], all[i - 1]) << name_of(mode) << i;
  }
}

TEST(LinearSlice, FrozenPartsGetNothing) {
  Rng rng(5);
  for (const Operator& op : all_operators(6))
    for (const SelectMode mode : {SelectMode::first, SelectMode::top_norm})
      for (const WeightGrad kind : kKinds) {
        const SlicedBackward slice = slice_of(mode, kind, 3, rng);
        const Tensor dy = normal({6, op.out}, 8);
        const auto all = gradients(op, dy, &slice);
        for (size_t wanted = 0; wanted < op.inputs.size(); ++wanted) {
          std::vector<bool> only(op.inputs.size(), false);
          only[wanted] = true;
          EXPECT_EQ(values_if_defined(gradients(op, dy, &slice, only)[wanted]),
                    values_if_defined(all[wanted]))
              << op.name << " " << to_string(slice) << " input " << wanted;
        }
      }
}

// ---- without bias ----

TEST(LinearSlice, RandomRowsAreUnbiasedOverAllSets) {
  constexpr int64_t kRows = 6;
  for (const Operator& op : all_operators(kRows))
    for (const int64_t n : {2, 3}) {
      const Tensor dy = normal({kRows, op.out}, 8);
      const auto dense = gradients(op, dy, nullptr);
      std::vector<Tensor> sums;
      int sets = 0;
      for (unsigned set = 0; set < 1u << kRows; ++set) {
        if (std::popcount(set) != n) continue;
        std::vector<int32_t> rows;
        for (int32_t row = 0; row < kRows; ++row)
          if (set >> row & 1) rows.push_back(row);
        Rng rng(1);
        SlicedBackward slice = slice_of(SelectMode::random, WeightGrad::slice, n, rng);
        slice.shared = fixed(kRows, rows, std::vector<float>(size_t(n), float(kRows) / float(n)));
        const auto one = gradients(op, dy, &slice);
        for (size_t i = 0; i < one.size(); ++i)
          sets ? sums[i] = add(sums[i], one[i]) : (sums.push_back(one[i]), sums[i]);
        ++sets;
      }
      EXPECT_EQ(sets, n == 2 ? 15 : 20);
      for (size_t i = 0; i < dense.size(); ++i)
        expect_near_if_defined(scale(sums[i], 1.0 / sets), dense[i], 1e-12, op.name + std::to_string(i));
    }
}

// Rows of norms 4, 2, 1 and 1, of which two are drawn: p = 1, 1/2, 1/4, 1/4. Systematic sampling then has
// four outcomes, one per quarter of the interval that its one random number is drawn from.
TEST(LinearSlice, ImportantRowsAreUnbiasedOverAllDraws) {
  const std::vector<std::vector<int32_t>> draws{{0, 1}, {0, 1}, {0, 2}, {0, 3}};
  const std::vector<float> inverse{1, 2, 4, 4};
  for (const Operator& op : all_operators(4)) {
    std::vector<double> rows(size_t(4 * op.out), 0.0);
    for (size_t row = 0; row < 4; ++row)
      rows[row * size_t(op.out) + row] = (row % 2 ? -4.0 : 4.0) / double(inverse[row]);
    const Tensor dy = Tensor::from(rows, {4, op.out});
    const auto dense = gradients(op, dy, nullptr);
    std::vector<Tensor> sums;
    for (const auto& chosen : draws) {
      Rng rng(1);
      SlicedBackward slice = slice_of(SelectMode::importance, WeightGrad::slice, 2, rng);
      slice.shared = fixed(4, chosen, {inverse[size_t(chosen[0])], inverse[size_t(chosen[1])]});
      const auto one = gradients(op, dy, &slice);
      for (size_t i = 0; i < one.size(); ++i)
        sums.size() > i ? sums[i] = add(sums[i], one[i]) : (sums.push_back(one[i]), sums[i]);
    }
    for (size_t i = 0; i < dense.size(); ++i)
      expect_near_if_defined(scale(sums[i], 0.25), dense[i], 1e-12, op.name + std::to_string(i));

    // These are the draws that the mode makes, and it makes all of them.
    std::vector<int> seen(draws.size(), 0);
    for (uint64_t seed = 0; seed < 64; ++seed) {
      Rng rng(seed);
      SlicedBackward slice = slice_of(SelectMode::importance, WeightGrad::slice, 2, rng);
      slice.shared = std::make_shared<SharedRows>();
      gradients(op, dy, &slice);
      const Selection& made = slice.shared->selection;
      const auto found = std::find(draws.begin(), draws.end(), made.indices.to_vector<int32_t>());
      ASSERT_NE(found, draws.end());
      ++seen[size_t(found - draws.begin())];
      EXPECT_EQ(made.scales.to_vector<float>(), (std::vector<float>{1, inverse[size_t((*found)[1])]}));
    }
    EXPECT_GT(seen[0], 16);  // of 64, 32 expected
    EXPECT_GT(seen[2], 5);   // 16 expected, as for the last
    EXPECT_GT(seen[3], 5);
  }
}

// ---- which rows ----

TEST(LinearSlice, ChoosesAmongTheValidRowsAlone) {
  for (const Operator& op : all_operators(10))
    for (const SelectMode mode : kModes) {
      Rng rng(5);
      SlicedBackward slice = slice_of(mode, WeightGrad::slice, 4, rng);
      if (mode == SelectMode::threshold)
        slice.threshold = 0;
      else
        slice.n.reset(), slice.share = 0.5;
      slice.valid = Tensor::from(std::vector<int32_t>{6}, {1});
      slice.shared = std::make_shared<SharedRows>();
      gradients(op, normal({10, op.out}, 8), &slice);
      const Selection& made = slice.shared->selection;
      // Half of 6 rows, not of 10; the threshold takes all of them.
      EXPECT_EQ(made.count.item<int32_t>(), mode == SelectMode::threshold ? 6 : 3);
      for (int32_t n = 0; n < made.count.item<int32_t>(); ++n)
        EXPECT_LT(made.indices.to_vector<int32_t>()[size_t(n)], 6);
      if (mode == SelectMode::random) EXPECT_EQ(made.scales.to_vector<float>()[0], 2.0f);  // 6 / 3
    }
}

TEST(LinearSlice, AShareIsRoundedDownToOneRowAtLeast) {
  const auto rows = [](int64_t rows, double share) { return share_of_rows(rows, share); };
  EXPECT_EQ(rows(16384, 0.1), 1638);
  EXPECT_EQ(rows(10, 0.1), 1);
  EXPECT_EQ(rows(100, 0.29), 29);  // 28.999999999999996 in f64
  EXPECT_EQ(rows(5, 0.1), 1);
  EXPECT_EQ(rows(0, 0.1), 0);
  EXPECT_EQ(rows(7, 1), 7);
  EXPECT_EQ(rows(2147483646, 1), 2147483646);
  EXPECT_EQ(message_of([&] { rows(7, 0); }), "select: a share of 0; expected a number above 0, at most 1");
}

TEST(LinearSlice, RowsWithNanAreChosenByTheModesThatLook) {
  for (const Operator& op : all_operators(8))
    for (const SelectMode mode : {SelectMode::top_norm, SelectMode::threshold, SelectMode::importance}) {
      Rng rng(5);
      SlicedBackward slice = slice_of(mode, WeightGrad::slice, 1, rng);
      if (slice.threshold) slice.threshold = 1e9;
      const Tensor dy = normal({8, op.out}, 8);
      dy.slice(0, 5, 6).fill(kNan);
      const auto grads = gradients(op, dy, &slice);
      const auto dx = values_if_defined(grads[0]);
      for (size_t i = 0; i < dx.size(); ++i) EXPECT_EQ(std::isnan(dx[i]), i / 5 == 5) << op.name << i;
      for (const double each : values_if_defined(grads[1])) EXPECT_TRUE(std::isnan(each));
    }
}

TEST(LinearSlice, AThresholdThatNoRowReachesGivesZeros) {
  Rng rng(5);
  for (const Operator& op : all_operators(8)) {
    SlicedBackward slice = slice_of(SelectMode::threshold, WeightGrad::slice, 0, rng);
    slice.threshold = 1e9;
    const auto grads = gradients(op, normal({8, op.out}, 8), &slice);
    for (const size_t i : op.weights)
      for (const double each : values_if_defined(grads[i])) EXPECT_EQ(each, 0);
    for (const double each : values_if_defined(grads[0])) EXPECT_EQ(each, 0);
  }
}

TEST(LinearSlice, NoRowsGiveGradientsOfZero) {
  Rng rng(5);
  for (const Operator& op : all_operators(0))
    for (const SelectMode mode : kModes) {
      const SlicedBackward slice = slice_of(mode, WeightGrad::slice, 3, rng);
      const auto grads = gradients(op, normal({0, op.out}, 8), &slice);
      EXPECT_EQ(grads[0].shape(), Shape({0, 5}));
      for (const double each : values_if_defined(grads[1])) EXPECT_EQ(each, 0);
    }
}

// ---- what it keeps and draws ----

// Two calls of one network: the second, whose backward pass runs first, chooses and scales; the first gets
// the same rows as they are.
TEST(LinearSlice, CallsThatShareTheirRowsScaleThemOnce) {
  const Tensor up = normal({7, 5}, 2), down = normal({4, 7}, 3), dy = normal({9, 4}, 4);
  for (const SelectMode mode : kModes)
    for (const WeightGrad kind : kKinds) {
      const auto run = [&](bool one_call) {
        Rng rng(11);
        Tensor x = normal({9, 5}, 1), first = up.detach(), second = down.detach();
        for (Tensor* each : {&x, &first, &second}) require_grad(*each);
        SlicedBackward slice = slice_of(mode, kind, 3, rng);
        slice.shared = std::make_shared<SharedRows>();
        Tape tape;
        const Tensor y = one_call ? mlp(x, first, second, Activation::silu, {}, {}, {}, slice)
                                  : linear(silu(linear(x, first, {}, {}, slice)), second, {}, {}, slice);
        tape.backward(std::vector{y}, std::vector{dy});
        return std::vector{grad(x), grad(first), grad(second)};
      };
      const auto one = run(true), two = run(false);
      for (size_t i = 0; i < 3; ++i)
        expect_near_if_defined(two[i], one[i], 1e-12,
                               std::string(name_of(mode)) + " " + name_of(kind) + " " + std::to_string(i));
    }
}

TEST(LinearSlice, KnownRowsAreAllThatForwardKeeps) {
  constexpr int64_t kRows = 1024, kWidth = 256;
  Tensor x = normal({kRows, kWidth}, 1, DType::f32), up = normal({kWidth, kWidth}, 2, DType::f32),
         down = normal({kWidth, kWidth}, 3, DType::f32);
  require_grad(up), require_grad(down);
  Rng rng(5);
  const auto kept = [&](const SlicedBackward* slice) {
    Tape tape;
    const size_t before = Device::cpu().allocator().stats().allocated;
    Tensor input = x.clone();
    Tensor y = slice ? mlp(input, up, down, Activation::gelu, {}, {}, {}, *slice)
                     : mlp(input, up, down, Activation::gelu);
    input = Tensor(), y = y.detach(), y = Tensor();
    return double(Device::cpu().allocator().stats().allocated - before);
  };
  const double dense = kept(nullptr);
  EXPECT_GE(dense, 3.0 * 4 * kRows * kWidth);  // x, h, a
  for (const SelectMode mode : {SelectMode::first, SelectMode::random}) {
    const SlicedBackward slice{.rows = mode, .share = 0.1, .rng = rng};
    EXPECT_LE(kept(&slice), 0.15 * dense) << name_of(mode);
    EXPECT_GE(kept(&slice), 2.0 * 4 * 102 * kWidth) << name_of(mode);
  }
  const SlicedBackward looks{.rows = SelectMode::top_norm, .share = 0.1};
  EXPECT_LE(kept(&looks), 0.7 * dense);  // a is made of the chosen rows of h
}

TEST(LinearSlice, ARecomputedCallChoosesTheSameRows) {
  const Tensor weight = normal({4, 5}, 2), dy = normal({9, 4}, 3);
  for (const SelectMode mode : {SelectMode::random, SelectMode::importance}) {
    const auto gradient = [&](bool recomputed) {
      Rng rng(11);
      const SlicedBackward slice = slice_of(mode, WeightGrad::slice, 3, rng);
      Tensor x = normal({9, 5}, 1);
      require_grad(x);
      Tape tape;
      const auto f = [&](const Tensor& in) { return linear(in, weight, {}, {}, slice); };
      tape.backward(std::vector{recomputed ? checkpoint(f, x) : f(x)}, std::vector{dy});
      EXPECT_EQ(rng.state().offset, 1u);
      return values_if_defined(grad(x));
    };
    EXPECT_EQ(gradient(true), gradient(false));
  }
}

TEST(LinearSlice, EachCallDrawsItsOwnRows) {
  Rng rng(11);
  const Operator op = linear_operator(40);
  const Tensor dy = normal({40, 4}, 8);
  for (const SelectMode mode : {SelectMode::random, SelectMode::importance}) {
    const SlicedBackward slice = slice_of(mode, WeightGrad::slice, 10, rng);
    EXPECT_NE(values_if_defined(gradients(op, dy, &slice)[0]),
              values_if_defined(gradients(op, dy, &slice)[0]));
  }
}

// ---- errors ----

TEST(LinearSlice, SettingsThatDoNotGoTogether) {
  Rng rng(1);
  const Operator op = linear_operator(4);
  const auto message = [&](const SlicedBackward& slice) {
    return message_of([&] { op.run(op.inputs, &slice); });
  };
  EXPECT_EQ(message({}), "linear: the slice does not say how many rows; set n or share");
  EXPECT_EQ(message({.n = -1}), "linear: the slice has n = -1; expected 1 or more rows");
  EXPECT_EQ(message({.n = 0}), "linear: the slice has n = 0; expected 1 or more rows");
  EXPECT_EQ(message({.share = 1.5}),
            "linear: the slice has a share of 1.5; expected a number above 0, at most 1 (all rows)");
  EXPECT_EQ(message({.share = 0}),
            "linear: the slice has a share of 0; expected a number above 0, at most 1 (all rows)");
  EXPECT_EQ(message({.share = kNan}),
            "linear: the slice has a share of nan; expected a number above 0, at most 1 (all rows)");
  EXPECT_EQ(message({.n = 3, .share = 0.5}),
            "linear: the slice has n = 3 and a share of 0.5; give one of the two");
  EXPECT_EQ(message({.rows = SelectMode::random, .n = 3}),
            "linear: a slice of mode random draws random numbers; set SlicedBackward::rng to a generator");
  EXPECT_EQ(message({.rows = SelectMode::threshold}),
            "linear: a slice of mode threshold needs a threshold; set SlicedBackward::threshold");
  EXPECT_EQ(
      message({.rows = SelectMode::threshold, .n = 3, .threshold = 1}),
      "linear: a slice of mode threshold has no n, the threshold decides how many rows there are; leave "
      "it out");
  EXPECT_EQ(message({.rows = SelectMode::threshold, .threshold = kNan}),
            "linear: the slice's threshold is NaN; expected a number");
  EXPECT_EQ(message({.rows = SelectMode::top_norm, .n = 3, .threshold = 1}),
            "linear: a slice of mode top_norm has no threshold; give n or share, or choose mode threshold");
  EXPECT_EQ(message_of([&] { parse_weight_grad("half"); }),
            "slice: there is no weight_grad \"half\"; expected none, slice or full");
  EXPECT_EQ(message_of([&] { parse_select_mode("best"); }),
            "select: there is no way to choose rows \"best\"; expected first, top_norm, threshold, random or "
            "importance");
  const SlicedBackward two_dims{.n = 2, .valid = Tensor::from(std::vector<int32_t>{1, 2}, {2})};
  Tensor x = op.inputs[0].detach();
  require_grad(x);
  const Tape tape;
  expect_error([&] { linear(x, op.inputs[1], {}, {}, two_dims); }, {"valid rows", "expected i32 [1] on cpu"});
  for (const Operator& each : all_operators(4)) {
    const SlicedBackward bad{.n = -1};
    expect_error([&] { each.run(each.inputs, &bad); }, {each.name, ": the slice has n = -1"});
  }
}

}  // namespace
}  // namespace tessera::ops
