#include <gtest/gtest.h>

#include <functional>
#include <random>

#include "autograd/checkpoint.h"
#include "autograd/gradcheck.h"
#include "autograd/tape.h"
#include "ops/activation/activation.h"
#include "ops/linear/linear.h"
#include "ops/pointwise/pointwise.h"
#include "ops/reduce/reduce.h"
#include "ops/shape/shape.h"
#include "tests/autograd/leaves.h"
#include "tests/errors.h"

/// The gradient of a view is the same view of its base's gradient.

namespace tessera {
namespace {

Tensor counting(const Shape& shape, double first = 1) {
  std::vector<double> values(size_t(shape.count()));
  for (size_t i = 0; i < values.size(); ++i) values[i] = first + double(i);
  return Tensor::from(values, shape);
}

Tensor counting_leaf(const Shape& shape) {
  Tensor x = counting(shape);
  require_grad(x);
  return x;
}

/// y = x, whose backward writes factor dy where the tape says, and notes the place.
Tensor written(const Tensor& x, double factor, GradTarget& seen) {
  Tensor y = x.detach().clone();
  Tape::recording(x)->record("written", {&x}, {&y}, [factor, &seen](Backward& b) {
    seen = b.target(0);
    const Tensor dx = ops::scale(b.grad(), factor);
    if (!seen.grad.defined()) return b.give(0, Tensor(dx));
    seen.grad.copy_from(seen.accumulate ? ops::add(seen.grad, dx) : dx);
    b.written(0, seen);
  });
  return y;
}

TEST(ViewGradient, OfAViewOfAViewIsWrittenInTheBasesMemory) {
  const Tensor x = counting_leaf({3, 8});
  Tape tape;
  const Tensor h = ops::relu(x);
  retain_grad(h);
  // [3, 8] -> [3, 4, 2] -> [4, 3, 2] -> its rows 1 and 2 -> [2, 6]
  const Tensor heads = ops::transpose(ops::reshape(h, {3, 4, 2}), 0, 1);
  const Tensor part = ops::slice(heads, 0, 1, 3);
  const Tensor rows = ops::transpose(part, 0, 1);
  GradTarget seen;
  const Tensor y = written(rows, 10, seen);
  tape.backward(std::vector{y}, std::vector{counting({3, 2, 2})});
  EXPECT_TRUE(seen.part);
  EXPECT_TRUE(seen.grad.shares_storage(grad(h)));
  std::vector<double> expected;
  for (int row = 0; row < 3; ++row)
    for (int column = 0; column < 8; ++column)
      expected.push_back(column >= 2 && column < 6 ? 10. * (row * 4 + column - 1) : 0);
  EXPECT_EQ(values(grad(x)), expected);
}

TEST(ViewGradient, OfARangeOfARangeIsWrittenInTheBasesMemory) {
  const Tensor x = counting_leaf({2, 9});
  Tape tape;
  const Tensor h = ops::relu(x);
  retain_grad(h);
  Tensor part = h;
  for (int i = 0; i < 4; ++i) part = ops::slice(part, 1, 1, part.size(1));
  GradTarget seen;
  const Tensor y = written(ops::slice(part, 1, 2, 4), 10, seen);  // columns 6 and 7
  tape.backward(std::vector{y}, std::vector{counting({2, 2})});
  EXPECT_TRUE(seen.part);
  EXPECT_TRUE(seen.grad.shares_storage(grad(h)));
  EXPECT_EQ(grad(x).to_vector<double>(),
            (std::vector<double>{0, 0, 0, 0, 0, 0, 10, 20, 0, 0, 0, 0, 0, 0, 0, 30, 40, 0}));
}

TEST(ViewGradient, OfRowsThatALoopTakesOffWhatIsLeft) {
  constexpr int64_t kRows = 7;
  for (const int64_t retained : {-1, 0, 3}) {
    const Tensor x = counting_leaf({kRows, 2});
    Tape tape;
    Tensor rest = ops::scale(x, 1), sum, kept;
    for (int64_t i = 0; i < kRows; ++i) {
      const Tensor row = ops::scale(ops::slice(rest, 0, 0, 1), double(i + 1));
      rest = ops::slice(rest, 0, 1, kRows - i);
      if (i == retained) retain_grad(rest), kept = rest;
      sum = sum.defined() ? ops::add(sum, row) : row;
    }
    tape.backward(ops::sum(sum));
    std::vector<double> expected;
    for (int64_t i = 1; i <= kRows; ++i) expected.insert(expected.end(), 2, double(i));
    EXPECT_EQ(grad(x).to_vector<double>(), expected);
    if (!kept.defined()) continue;
    expected.erase(expected.begin(), expected.begin() + 2 * (retained + 1));
    EXPECT_EQ(grad(kept).to_vector<double>(), expected);
  }
}

TEST(ViewGradient, OfManyViewsOfViews) {
  using Next = std::function<Tensor(const Tensor&, int)>;
  const auto reshape = [](const Tensor& t, int i) {
    return ops::reshape(t, i % 2 ? Shape{2, 3} : i % 4 ? Shape{6} : Shape{3, 2});
  };
  const auto transpose = [](const Tensor& t, int) { return ops::transpose(t, 0, 1); };
  const auto whole = [](const Tensor& t, int i) { return ops::slice(t, i % 2, 0, t.size(i % 2)); };
  const Next kinds[] = {reshape, transpose, whole,
                        [&](const Tensor& t, int i) { return i % 2 ? transpose(t, i) : whole(t, i); },
                        [&](const Tensor& t, int i) {
                          return i % 3 ? transpose(t, i) : ops::reshape(t, {t.size(1), t.size(0)});
                        }};
  for (const Next& next : kinds)
    for (const int depth : {9, 20'000}) {  // recursion over so many would not fit on the stack
      const Tensor x = counting_leaf({2, 3});
      Tape tape;
      Tensor view = ops::scale(x, 1), loss = ops::sum(ops::scale(view, 0));
      for (int i = 0; i < depth; ++i) {
        view = next(view, i);
        if (i == 2 || i == 3) loss = ops::add(loss, ops::sum(view));
        if (i == 5) retain_grad(view);
      }
      const Tensor weights = counting(view.shape());  // 1, 2, ... in the order of the last view
      tape.backward(ops::add(loss, ops::sum(ops::mul(view, weights))));
      Tensor order = counting({2, 3}, 0);  // where the elements of the last view come from
      for (int i = 0; i < depth; ++i) {
        const NoTape off;
        order = next(order, i).clone();
      }
      std::vector<double> expected(6);
      const std::vector<double> places = values(order);
      for (size_t i = 0; i < 6; ++i) expected[size_t(places[i])] = 2 + double(i + 1);
      EXPECT_EQ(values(grad(x)), expected) << depth;
    }
}

TEST(ViewGradient, OfAReshapeOfAReshapeIsWrittenInTheBasesMemory) {
  const Tensor x = counting_leaf({2, 6});
  Tape tape;
  const Tensor h = ops::relu(x);
  retain_grad(h);
  GradTarget seen;
  const Tensor flat = ops::reshape(ops::reshape(h, {3, 4}), {12});
  const Tensor y = written(ops::slice(flat, 0, 6, 12), 10, seen);
  tape.backward(std::vector{y}, std::vector{counting({6})});
  EXPECT_TRUE(seen.grad.shares_storage(grad(h)));
  EXPECT_EQ(values(grad(x)), (std::vector<double>{0, 0, 0, 0, 0, 0, 10, 20, 30, 40, 50, 60}));
}

TEST(ViewGradient, APartIsOverwrittenOnceAndThenAddedTo) {
  const Tensor x = counting_leaf({6});
  Tape tape;
  const Tensor h = ops::relu(x);
  const Tensor first = ops::slice(h, 0, 0, 4), second = ops::slice(h, 0, 2, 6);  // they overlap
  GradTarget early, late;
  const Tensor a = written(first, 1, early), b = written(second, 1, late);
  tape.backward(std::vector{a, b}, std::vector{counting({4}, 1), counting({4}, 10)});
  EXPECT_TRUE(late.part && !late.accumulate);
  EXPECT_TRUE(early.accumulate) << "half of it held something; the other half is zeroed before";
  EXPECT_EQ(values(grad(x)), (std::vector<double>{1, 2, 3 + 10, 4 + 11, 12, 13}));
}

TEST(ViewGradient, APartIsGivenOutOnlyIfNoOtherInputLiesInIt) {
  // One entry reads a slice and another that overlaps it, one next to it, the same again, or the whole.
  const std::pair<int64_t, int64_t> others[] = {{2, 4}, {3, 4}, {0, 3}, {0, 4}};
  for (const auto& [begin, end] : others) {
    const Tensor x = counting_leaf({4});
    Tape tape;
    const Tensor h = ops::relu(x), a = ops::slice(h, 0, 0, 3);
    const Tensor b = end - begin == 4 ? h : ops::slice(h, 0, begin, end);
    const bool apart = begin == 3;
    Tensor y = counting({1});
    tape.record("both", {&a, &b}, {&y}, [&, length = end - begin](Backward& back) {
      const GradTarget to[] = {back.target(0), back.target(1)};
      const Tensor made[] = {counting({3}), counting({length}, 10)};
      for (const int input : {0, 1}) {
        EXPECT_EQ(to[input].part, apart) << begin << " " << end;
        if (to[input].part) to[input].grad.copy_from(made[input]);
      }
      for (const int input : {0, 1})
        to[input].part ? back.written(input, to[input]) : back.accumulate(input, made[input]);
    });
    tape.backward(y);
    std::vector<double> expected{1, 2, 3, 0};
    for (int64_t i = begin; i < end; ++i) expected[size_t(i)] += 10 + double(i - begin);
    EXPECT_EQ(values(grad(x)), expected);
  }
}

TEST(ViewGradient, OfAParameterGoesToItsBufferAndZeroesTheRest) {
  const Tensor w = counting_leaf({8}), arena = Tensor::full({10}, 99, DType::f64, kCpu);
  set_grad_buffer(w, arena.slice(0, 1, 9));
  for (int step = 0; step < 3; ++step) {
    Tape tape;
    // A matrix and a bias that are parts of one parameter.
    const Tensor matrix = ops::reshape(ops::slice(w, 0, 0, 4), {2, 2}), bias = ops::slice(w, 0, 4, 6);
    const Tensor x = counting({1, 2});
    tape.backward(ops::sum(ops::linear(x, matrix, bias)));
    if (step < 2) {
      EXPECT_EQ(values(arena), (std::vector<double>{99, 1, 2, 1, 2, 1, 1, 0, 0, 99})) << step;
      arena.slice(0, 1, 9).fill(step == 0 ? 77 : 0.5);  // of the step before: stale, or added to
      if (step == 0) zero_grad(w);
    }
  }
  EXPECT_EQ(values(arena), (std::vector<double>{99, 1.5, 2.5, 1.5, 2.5, 1.5, 1.5, 0.5, 0.5, 99}));
}

TEST(ViewGradient, OfANarrowParameterIsAsWideAsTheParameters) {
  const auto narrow = [](const Shape& shape, double first) {
    Tensor made = ops::scale(counting(shape, first), 1.0 / 7).to(DType::bf16);
    require_grad(made, DType::f32);
    return made;
  };
  // By linear, as parts and as a whole of another shape: the gradients of leaves of their own, in any step.
  for (const bool parts : {true, false}) {
    const Tensor w = narrow({6, 4}, 1), x = ops::scale(counting({3, 4}), 1.0 / 3).to(DType::bf16);
    set_grad_buffer(w, Tensor::full({6, 4}, 99, DType::f32, kCpu));
    const int64_t rows = parts ? 2 : 6;
    std::vector<Tensor> own;
    for (int64_t row = 0; row < 6; row += rows) {
      own.push_back(w.detach().slice(0, row, row + rows).clone());
      require_grad(own.back(), DType::f32);
    }
    for (int step = 0; step < 3; ++step) {
      {
        Tape tape;
        const std::vector<Tensor> views =
            parts ? ops::split(w, 0, {2, 2, 2}) : std::vector{ops::reshape(ops::reshape(w, {24}), {6, 4})};
        Tensor sum = ops::sum(ops::linear(x, views[0]));
        for (size_t i = 1; i < views.size(); ++i) sum = ops::add(sum, ops::sum(ops::linear(x, views[i])));
        tape.backward(sum);
      }
      std::vector<double> expected;
      for (const Tensor& each : own) {
        Tape tape;
        tape.backward(ops::sum(ops::linear(x, each)));
        for (const double value : values(grad(each))) expected.push_back(value);
      }
      EXPECT_EQ(values(grad(w)), expected) << parts << " " << step;
      if (step > 0) continue;  // then add to what is there
      zero_grad(w);
      for (const Tensor& each : own) zero_grad(each);
    }
  }
}

TEST(ViewGradient, OfAParameterIsRestoredByAPassThatThrows) {
  for (const bool adds : {false, true}) {
    const Tensor w = counting_leaf({4});
    if (adds) {
      Tape tape;
      tape.backward(ops::sum(ops::scale(w, 5)));
    }
    Tape tape;
    const Tensor scaled = ops::scale(w, 1), bad = ops::silu(scaled);
    const Tensor loss = ops::add(ops::sum(bad), ops::sum(ops::scale(ops::slice(w, 0, 1, 3), 2)));
    scaled.detach().fill(0);
    EXPECT_NE(message_of([&] { tape.backward(loss); }), "");
    ASSERT_EQ(grad(w).defined(), adds);
    if (adds) {
      EXPECT_EQ(values(grad(w)), std::vector<double>(4, 5));
    }
    zero_grad(w);
    Tape next;
    next.backward(ops::sum(ops::slice(w, 0, 3, 4)));
    EXPECT_EQ(values(grad(w)), (std::vector<double>{0, 0, 0, 1})) << "nothing is left of the pass that threw";
  }
}

TEST(ViewGradient, OfACheckpointsInputHasNoGaps) {
  for (const bool recompute : {false, true}) {
    const Tensor x = counting_leaf({6});
    Tape tape;
    const auto f = [](const Tensor& t) { return ops::silu(ops::slice(t, 0, 2, 4)); };
    const Tensor h = ops::scale(x, 1), y = recompute ? checkpoint(f, h) : f(h);
    tape.backward(std::vector{y}, std::vector{counting({2})});
    const std::vector<double> dx = values(grad(x));
    EXPECT_EQ((std::vector<double>{dx[0], dx[1], dx[4], dx[5]}), std::vector<double>(4, 0));
    EXPECT_NE(dx[2], 0);
  }
}

TEST(ViewGradient, WhereTheBasesGradientAllowsNoSuchView) {
  // h's rows lie next to each other, and so do those of its gradient's memory; a leaf's buffer may not.
  Tensor x = Tensor::empty_packed({4, 5}, DType::f64, kCpu);
  x.copy_from(counting({4, 5}));
  require_grad(x);
  set_grad_buffer(x, Tensor::full({4, 7}, 99, DType::f64, kCpu).slice(1, 0, 5));
  Tape tape;
  const Tensor flat = ops::reshape(x, {20});
  ASSERT_TRUE(flat.shares_storage(x));
  const Tensor a = ops::slice(flat, 0, 3, 7), b = ops::slice(flat, 0, 6, 9);
  GradTarget seen;
  const Tensor y = written(a, 1, seen), z = written(b, 1, seen);
  tape.backward(std::vector{y, z}, std::vector{counting({4}, 1), counting({3}, 10)});
  std::vector<double> expected(20);
  for (int i = 0; i < 4; ++i) expected[size_t(3 + i)] += 1 + i;
  for (int i = 0; i < 3; ++i) expected[size_t(6 + i)] += 10 + i;
  EXPECT_EQ(values(grad(x)), expected);
}

TEST(ViewGradient, AgreesWithDifferencesWhateverTheViews) {
  std::mt19937 random(7);
  for (int round = 0; round < 40; ++round) {
    const unsigned seed = random();
    const auto f = [&](const std::vector<Tensor>& in) {
      std::mt19937 choose(seed);
      std::vector<Tensor> known{in[0], ops::silu(in[0])}, results;
      for (int step = 0; step < 10; ++step) {
        const Tensor x = known[choose() % known.size()];
        const int dim = int(choose() % unsigned(x.rank()));
        const int64_t size = x.size(dim), begin = size > 1 ? int64_t(choose() % unsigned(size)) : 0;
        const unsigned kind = choose() % 6;
        if (kind == 0) known.push_back(ops::slice(x, dim, begin, size, 1 + int64_t(choose() % 2)));
        if (kind == 1)
          for (const Tensor& part : ops::split(x, dim, {begin, size - begin})) known.push_back(part);
        if (kind == 2 && x.rank() > 1) known.push_back(ops::transpose(x, 0, x.rank() - 1));
        if (kind == 3) known.push_back(ops::reshape(x, {x.count()}));
        if (kind == 4 && x.rank() < 4) known.push_back(ops::reshape(x, x.shape().inserted(dim, 1)));
        if (kind == 5) known.push_back(ops::tanh(x));
      }
      for (const Tensor& x : known)
        if (x.count() > 0) results.push_back(ops::mul(ops::sum(x), ops::mean(ops::mul(x, x))));
      return results;
    };
    const auto result = gradcheck(f, {ops::scale(counting({4, 3, 2}), 0.05)});
    EXPECT_TRUE(result.ok) << "seed " << seed << ": " << result.message;
  }
}

}  // namespace
}  // namespace tessera
