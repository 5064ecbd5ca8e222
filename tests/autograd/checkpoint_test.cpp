#include "autograd/checkpoint.h"

#include <gtest/gtest.h>

#include <cmath>

#include "ops/activation/activation.h"
#include "ops/dropout/dropout.h"
#include "ops/pointwise/pointwise.h"
#include "ops/reduce/reduce.h"
#include "tests/autograd/leaves.h"
#include "tests/errors.h"

namespace tessera {
namespace {

TEST(Checkpoint, UsesTheSameRandomNumbersAgain) {
  struct Run {
    std::vector<double> y, dx;
    Rng::State state;
  };
  const auto run = [](bool recompute) {
    Rng rng(5);
    const Tensor x = leaf(std::vector<double>(257, 1.5));
    Tape tape;
    const auto f = [&](const Tensor& t) {
      return ops::mul(ops::dropout(ops::dropout(t, 0.3, rng), 0.4, rng), t);
    };
    const Tensor h = ops::dropout(x, 0.1, rng);
    const Tensor y = ops::dropout(recompute ? checkpoint(f, h) : f(h), 0.2, rng);
    tape.backward(ops::sum(y));
    return Run{values(y.detach()), values(grad(x)), rng.state()};
  };
  const Run plain = run(false), again = run(true);
  EXPECT_EQ(again.y, plain.y);
  EXPECT_EQ(again.dx, plain.dx);
  EXPECT_EQ(again.state, plain.state) << "recomputing draws nothing";
  EXPECT_NE(std::count(plain.dx.begin(), plain.dx.end(), 0.0), 0);
}

TEST(Checkpoint, NestsWithRandomNumbers) {
  const auto run = [](int depth) {
    Rng rng(8);
    const Tensor x = leaf(std::vector<double>(64, 2));
    Tape tape;
    const auto inner = [&](const Tensor& t) { return ops::dropout(ops::silu(t), 0.5, rng); };
    const auto outer = [&](const Tensor& t) {
      const Tensor h = ops::dropout(t, 0.25, rng);
      return ops::mul(depth > 1 ? checkpoint(inner, h) : inner(h), t);
    };
    tape.backward(ops::sum(depth > 0 ? checkpoint(outer, x) : outer(x)));
    return values(grad(x));
  };
  EXPECT_EQ(run(1), run(0));
  EXPECT_EQ(run(2), run(0));
}

TEST(Checkpoint, ANarrowParameterAmongItsInputsKeepsAWideGradient) {
  const auto run = [](bool recompute) {
    Tensor w = Tensor::from(std::vector<double>{1, 2}, {2}).to(DType::bf16);
    require_grad(w, DType::f32);
    const Tensor x = Tensor::from(std::vector<double>{1, 0.0078125}, {2}).to(DType::bf16);
    const auto f = [&](const std::vector<Tensor>& in) {  // dw = 2 x + x x, of which bf16 holds a part
      return std::vector{ops::add(ops::scale(ops::mul(in[0], x), 2), ops::mul(ops::mul(in[0], x), x))};
    };
    Tape tape;
    tape.backward(ops::sum(recompute ? checkpoint(f, {w})[0] : f({w})[0]));
    return values(grad(w));
  };
  EXPECT_EQ(run(true), run(false));
  EXPECT_EQ(run(true)[1], 0x1p-6 + 0x1p-14);
}

TEST(Checkpoint, ParametersUsedInsideGetGradientsAndTheirHookOnce) {
  const Tensor x = leaf({1, 2}), weight = leaf({3, 4});
  int calls = 0;
  on_grad(weight, [&](const Tensor& d) {
    calls += 1;
    EXPECT_EQ(values(d), (std::vector<double>{1 + 1 * 2 * 3 + 3, 2 + 2 * 2 * 4 + 4}));
  });
  Tape tape;
  const Tensor y = checkpoint([&](const Tensor& t) { return ops::mul(ops::mul(t, weight), weight); }, x);
  const Tensor other = checkpoint([&](const Tensor& t) { return ops::mul(t, weight); }, x);
  const Tensor last = ops::mul(weight, weight);
  EXPECT_EQ(tape.size(), 3u);
  // dw = 2 x w (first) + x (second) + 2 w (last, halved below)
  tape.backward(ops::sum(ops::add(ops::add(y, other), ops::scale(last, 0.5))));
  EXPECT_EQ(calls, 1);
  EXPECT_EQ(values(grad(x)), (std::vector<double>{9 + 3, 16 + 4}));
}

TEST(Checkpoint, SeveralOutputsSomeUnusedSomeWithoutGradient) {
  const Tensor x = leaf({1, 2}), plain = Tensor::full({2}, 3, DType::f64, kCpu);
  Tape tape;
  const auto outputs = checkpoint(
      [](const std::vector<Tensor>& in) {
        return std::vector{ops::scale(in[0], 2), ops::relu(in[1]), ops::exp(in[0]), in[0]};
      },
      {x, plain});
  ASSERT_EQ(outputs.size(), 4u);
  EXPECT_TRUE(requires_grad(outputs[0]));
  EXPECT_FALSE(requires_grad(outputs[1]));
  EXPECT_TRUE(requires_grad(outputs[3])) << "an input that passes through";
  tape.backward(ops::sum(ops::add(outputs[0], outputs[3])));
  EXPECT_EQ(values(grad(x)), (std::vector<double>{3, 3}));
}

TEST(Checkpoint, RefusesAResultThatIsNotAnInput) {
  const Tensor x = leaf({1, 2});
  Tape tape;
  const Tensor h = ops::silu(x);
  const std::string said =
      message_of([&] { checkpoint([&](const Tensor& t) { return ops::mul(t, h); }, x); });
  EXPECT_NE(said.find("mul"), std::string::npos) << said;
  EXPECT_NE(said.find("input of the checkpointed function"), std::string::npos) << said;
  EXPECT_EQ(Tape::innermost(), &tape) << "the error leaves the tape as it was";
  tape.backward(ops::sum(checkpoint([](const Tensor& t) { return ops::mul(t, t); }, h)));
  EXPECT_TRUE(grad(x).defined());
}

TEST(Checkpoint, RefusesARecomputationWithOtherResults) {
  const Tensor x = leaf({1, 2});
  enum class Second { sum, more, fewer };
  for (const Second second : {Second::sum, Second::more, Second::fewer}) {
    Tape tape;
    bool again = false;
    const std::vector<Tensor> y = checkpoint(
        [&](const std::vector<Tensor>& in) {
          const Tensor h = ops::silu(in[0]), sum = ops::sum(h);
          if (!again) return std::vector{h, sum};
          if (second == Second::sum) return std::vector{sum, sum};
          return second == Second::more ? std::vector{h, sum, h} : std::vector{h};
        },
        {x});
    again = true;
    const char* const expected =
        second == Second::sum
            ? "checkpoint: output 0 of the function had the shape [2] and, run again for the "
              "backward pass, is f64[] on cpu"
        : second == Second::more
            ? "checkpoint: the function had 2 results and, run again for the backward pass, has 3"
            : "checkpoint: the function had 2 results and, run again for the backward pass, has 1";
    expect_error([&] { tape.backward(ops::sum(y[0])); }, {expected, "must do the same each time"});
  }
}

TEST(Checkpoint, RefusesARecomputationWithOtherDropouts) {
  const Tensor x = leaf({1, 2});
  for (const bool drops : {false, true}) {
    Rng rng(5);
    bool training = !drops;  // switched in between, as for an evaluation
    Tape tape;
    const Tensor y = checkpoint(
        [&](const Tensor& t) { return training ? ops::dropout(t, 0.5, rng) : ops::scale(t, 1); }, x);
    training = drops;
    expect_error([&] { tape.backward(ops::sum(y)); },
                 {drops ? "draws more random streams"
                        : "checkpoint: the function drew 1 random streams (a dropout is one) and, run again "
                          "for the backward pass, 0",
                  "must do the same each time"});
    EXPECT_FALSE(grad(x).defined());
  }
}

TEST(Checkpoint, RefusesACopyOfAResultInTheUsersFunction) {
  const Tensor x = leaf({1, 2});
  Tape tape;
  const auto copies = [](const Tensor& t) { return ops::silu(t).clone(); };
  expect_error([&] { checkpoint(copies, x); }, {"clone: f64[2]", "lose its gradient"});
  bool again = false;
  const Tensor y = checkpoint(
      [&](const Tensor& t) {
        const Tensor h = ops::silu(t);
        return again ? h.clone() : h;
      },
      x);
  again = true;
  expect_error([&] { tape.backward(ops::sum(y)); }, {"clone: f64[2]", "lose its gradient"});
}

TEST(Checkpoint, RefusesALeafThatIsReturnedAsItIs) {
  const Tensor x = leaf({1, 2}), weight = leaf({3, 4});
  Tape tape;
  expect_error([&] { checkpoint([&](const Tensor&) { return weight; }, x); },
               {"checkpoint: output 0", "f64[2]", "a parameter as it is"});
  const Tensor h = ops::silu(x);
  expect_error([&] { checkpoint([&](const Tensor&) { return h; }, x); },
               {"checkpoint: output 0", "belongs to another tape", "as an input"});
  EXPECT_EQ(Tape::innermost(), &tape) << "the error leaves the tape as it was";
}

/// A layer that multiplies by a number that each call changes.
struct CountingLayer {
  Tensor state = Tensor::full({1}, 1, DType::f64, kCpu);
  Tensor operator()(const Tensor& x) const {
    const Tensor now = state_of_first_run(state);
    const Tensor y = ops::mul(x, ops::mul(x, now.detach().clone()));
    if (!recomputing()) state.copy_from(ops::scale(state, 3));
    return y;
  }
};

TEST(Checkpoint, StateOfLayersIsThatOfTheFirstRun) {
  struct Run {
    std::vector<double> y, dx, state;
  };
  const auto run = [](int depth) {
    const CountingLayer layer;
    const Tensor x = leaf({1, -2});
    Tape tape;
    const auto inner = [&](const Tensor& t) { return layer(layer(t)); };
    const auto outer = [&](const Tensor& t) {
      const Tensor h = layer(t);
      return layer(depth > 1 ? checkpoint(inner, h) : inner(h));
    };
    EXPECT_EQ(checkpoint_depth(), 0);
    const Tensor y = layer(depth > 0 ? checkpoint(outer, x) : outer(x));
    tape.backward(ops::sum(y));
    return Run{values(y.detach()), values(grad(x)), values(layer.state)};
  };
  const Run plain = run(0);
  EXPECT_EQ(plain.state, (std::vector<double>{243})) << "five calls";
  for (const int depth : {1, 2}) {
    const Run again = run(depth);
    EXPECT_EQ(again.y, plain.y);
    EXPECT_EQ(again.dx, plain.dx);
    EXPECT_EQ(again.state, plain.state);
  }
}

TEST(Checkpoint, NoticesThatAnInputWasWritten) {
  const Tensor x = leaf({1, 2});
  Tape tape;
  const Tensor h = ops::scale(x, 1), y = checkpoint([](const Tensor&t) { return ops::silu(t); }, h);
  h.detach().fill(0);
  const std::string said = message_of([&] { tape.backward(ops::sum(y)); });
  EXPECT_NE(said.find("backward of checkpoint"), std::string::npos) << said;
  EXPECT_NE(said.find("written in place"), std::string::npos) << said;
}

TEST(Checkpoint, NoticesThatAParameterWasWritten) {
  for (const int depth : {1, 2}) {
    const Tensor x = leaf({1, 2}), weight = leaf({3, 4});
    const auto inner = [&](const Tensor& t) { return ops::mul(t, weight); };
    const auto outer = [&](const Tensor& t) { return depth > 1 ? checkpoint(inner, t) : inner(t); };
    {
      Tape tape;
      const Tensor y = checkpoint(outer, x);
      weight.copy_from(Tensor::full({2}, 5, DType::f64, kCpu));
      expect_error([&] { tape.backward(ops::sum(y)); },
                   {"backward of checkpoint", "f64[2]", "written in place after the forward pass"});
      EXPECT_FALSE(grad(weight).defined());
    }
    // A write between two passes is what optimizers do.
    Tape tape;
    tape.backward(ops::sum(checkpoint(outer, x)));
    EXPECT_EQ(values(grad(x)), (std::vector<double>{5, 5}));
    EXPECT_EQ(values(grad(weight)), (std::vector<double>{1, 2}));
  }
}

TEST(Checkpoint, FiniteCheckNamesTheOperatorInside) {
  const Tensor x = leaf({1, 2});
  Tape tape({.check_finite = true});
  const auto f = [](const Tensor& t) {
    Tensor y = t.detach().clone();
    if (Tape* const inside = Tape::recording(t))
      inside->record("bad", {&t}, {&y}, [](Backward& b) { b.accumulate(0, ops::scale(b.grad(), INFINITY)); });
    return ops::scale(ops::silu(y), 0.5);
  };
  const Tensor y = checkpoint(f, x);
  expect_error([&] { tape.backward(ops::sum(y)); }, {"non-finite gradient: backward of bad made"});
}

TEST(Checkpoint, NoticesThatTheFunctionChanged) {
  const Tensor x = leaf({1, 2});
  Rng rng(1);
  int calls = 0;
  Tape tape;
  const Tensor y = checkpoint(
      [&](const Tensor& t) {
        return calls++ ? ops::dropout(ops::dropout(t, 0.5, rng), 0.5, rng) : ops::dropout(t, 0.5, rng);
      },
      x);
  const std::string said = message_of([&] { tape.backward(ops::sum(y)); });
  EXPECT_NE(said.find("more random streams"), std::string::npos) << said;
}

TEST(Checkpoint, KeepsTheInputsAloneAndFreesThem) {
  const Tensor x = leaf(std::vector<double>(10'000, 0.5));
  {
    Tape tape;
    tape.backward(ops::sum(ops::scale(x, 1)));  // makes the leaf's gradient
  }
  const size_t before = kCpu.allocator().stats().allocated;
  {
    Tape tape;
    const auto f = [](const Tensor& t) {
      Tensor y = t;
      for (int i = 0; i < 10; ++i) y = ops::silu(y);
      return y;
    };
    const Tensor y = checkpoint(f, x);
    EXPECT_LT(kCpu.allocator().stats().allocated - before, 2 * 80'000u) << "y, not the ten results inside";
    tape.backward(ops::sum(y));
  }
  EXPECT_EQ(kCpu.allocator().stats().allocated, before);
}

TEST(Checkpoint, WithoutATapeOrWithoutNeedIsJustTheFunction) {
  const Tensor x = leaf({1, 2}), plain = Tensor::full({2}, 3, DType::f64, kCpu);
  const auto f = [](const Tensor& t) { return ops::silu(t); };
  EXPECT_EQ(values(checkpoint(f, x)), values(ops::silu(x)));
  Tape tape;
  EXPECT_FALSE(requires_grad(checkpoint(f, plain)));
  EXPECT_EQ(tape.size(), 0u);
}

}  // namespace
}  // namespace tessera
