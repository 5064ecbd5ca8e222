#include "autograd/tape.h"

#include <gtest/gtest.h>

#include <cmath>

#include "autograd/checkpoint.h"
#include "autograd/gradcheck.h"
#include "ops/activation/activation.h"
#include "ops/pointwise/pointwise.h"
#include "ops/reduce/reduce.h"
#include "tensor/kernels.h"

namespace tessera {
namespace {

TEST(Tape, RunsAMillionDeepChainWithoutRecursion) {
  Tensor x = Tensor::full({1}, 1.0, DType::f64, Device::cpu());
  require_grad(x);
  Tape tape;
  Tensor y = x;
  for (int i = 0; i < 1'000'000; ++i) y = ops::relu(y);
  EXPECT_EQ(tape.size(), 1'000'000u);
  tape.backward(y);
  EXPECT_EQ(grad(x).item<double>(), 1.0);
  EXPECT_EQ(tape.size(), 0u);
}

TEST(Tape, AddsUpTheGradientsOfASharedInput) {
  Tensor x = Tensor::full({3}, 2.0, DType::f64, Device::cpu());
  require_grad(x);
  Tape tape;
  const std::vector<Tensor> results{ops::relu_squared(x), ops::relu(x)};
  const std::vector<Tensor> grads(2, Tensor::full({3}, 1.0, DType::f64, Device::cpu()));
  tape.backward(results, grads);
  EXPECT_EQ(grad(x).to_vector<double>(), (std::vector<double>{5, 5, 5}));
}

/// y = 3 x, whose backward adds to x's gradient in place wherever it may.
Tensor tripled(const Tensor& x, bool take, bool& in_place) {
  Tensor y = ops::scale(x.detach(), 3);
  Tape::recording(x)->record("tripled", Site::here(), {&x}, {&y}, [take, &in_place](Backward& b) {
    Tensor dy = take ? b.take_grad() : b.grad();
    const Tensor dx = ops::scale(dy, 3);
    if (take) dy = Tensor();
    const GradTarget target = b.target(0);
    in_place = target.grad.defined();
    if (in_place) {
      accumulate(target.grad, dx);
      b.written(0, target);
    } else {
      b.accumulate(0, dx);
    }
  });
  return y;
}

TEST(Tape, AGradientIsAddedToInPlaceOnlyWhereNobodyElseReadsIt) {
  for (const bool take : {false, true}) {
    Tensor x = Tensor::full({3}, 2.0, DType::f64, Device::cpu());
    require_grad(x);
    Tape tape;
    const Tensor middle = ops::relu(x);
    bool in_place = false;
    const Tensor sum = ops::add(middle, tripled(middle, take, in_place));  // one dsum for both
    tape.backward(ops::sum(sum));
    EXPECT_EQ(in_place, take);
    EXPECT_EQ(grad(x).to_vector<double>(), (std::vector<double>{4, 4, 4}));
  }
}

TEST(Tape, SecondBackwardThrows) {
  Tensor x = Tensor::full({1}, 2.0, DType::f64, Device::cpu());
  require_grad(x);
  Tape tape;
  const Tensor y = ops::relu(x);
  tape.backward(y);
  EXPECT_THROW(tape.backward(y), Error);
  EXPECT_THROW(ops::relu(x), Error);
}

TEST(Tape, WritingASavedTensorInPlaceIsNoticed) {
  Tensor x = Tensor::full({4}, 2.0, DType::f64, Device::cpu());
  require_grad(x);
  Tape tape;
  const Tensor y = ops::silu(x);
  x.fill(1.0);
  try {
    tape.backward(std::vector{y}, std::vector{Tensor::full({4}, 1.0, DType::f64, Device::cpu())});
    FAIL() << "expected an error";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("backward of silu"), std::string::npos) << error.what();
  }
}

TEST(Tape, AViewOfATensorOnTheTapeIsRefused) {
  Tensor x = Tensor::zeros({4, 4}, DType::f64, Device::cpu());
  require_grad(x);
  EXPECT_THROW(x.slice(0, 0, 2), Error);
  EXPECT_NO_THROW(x.detach().slice(0, 0, 2));
}

TEST(Tape, FiniteCheckNamesOperatorModuleAndSite) {
  Tensor x = Tensor::full({2, 3}, 1e300, DType::f64, Device::cpu());
  require_grad(x);
  Tape tape({.check_finite = true});
  const ModuleScope outer("block", 3), inner("mlp");
  try {
    ops::relu_squared(x);
    FAIL() << "expected an error";
  } catch (const Error& error) {
    const std::string what = error.what();
    for (const char* part : {"relu_squared", "block.3.mlp", "f64[2, 3]", "tape_test.cpp"})
      EXPECT_NE(what.find(part), std::string::npos) << part << " in: " << what;
  }
}

TEST(Tape, BackwardBeginsWithTheLossScale) {
  const Tensor scale = Tensor::full({}, 1024, DType::f32, Device::cpu());
  for (const bool recompute : {false, true}) {
    Tensor x = Tensor::from(std::vector<double>{0.3, -1.2}, {2}), plain = x.clone();
    require_grad(x), require_grad(plain);
    const auto loss_of = [&](const Tensor& in) {
      const auto f = [](const Tensor& t) { return ops::mean(ops::silu(t)); };
      return recompute ? checkpoint(f, in) : f(in);
    };
    {
      Tape tape;
      tape.backward(loss_of(plain));
    }
    Tape tape({.loss_scale = scale});
    tape.backward(loss_of(x));
    for (int64_t i = 0; i < 2; ++i) EXPECT_EQ(grad(x).at({i}).item(), 1024 * grad(plain).at({i}).item());
  }
  EXPECT_THROW(Tape({.loss_scale = Tensor::full({1}, 1, DType::f32, Device::cpu())}), Error);
  EXPECT_THROW(Tape({.loss_scale = Tensor::full({}, 1, DType::f64, Device::cpu())}), Error);
}

/// Counts what its entries left to the end of the pass.
struct CountingEnd : PassEnd {
  int left = 0;
  static inline int finished = 0;
  void finish() override { finished += left; }
};

/// y = x, whose backward leaves one unit of work to the end, and notes whether x's gradient may wait.
Tensor leaves_work(const Tensor& x, std::vector<bool>& may_wait, bool fails = false) {
  Tensor y = x.detach();
  if (Tape* const tape = Tape::recording(x))
    tape->record("leaves_work", Site::here(), {&x}, {&y}, [&may_wait, fails](Backward& b) {
      EXPECT_EQ(CountingEnd::finished, 0) << "before all entries have run";
      may_wait.push_back(b.may_wait(0));
      b.at_end<CountingEnd>().left += 1;
      check(!fails, "this backward fails");
      b.accumulate(0, b.grad());
    });
  return y;
}

TEST(Tape, WorkLeftToTheEndOfAPassIsDoneOnceAllEntriesHaveRun) {
  Tensor x = Tensor::from(std::vector<double>{3}, {1}), other = Tensor::from(std::vector<double>{4}, {1});
  require_grad(x), require_grad(other);
  std::vector<bool> may_wait;
  const std::vector<Tensor> one{Tensor::from(std::vector<double>{1}, {1})};
  const auto pass = [&](auto&& result) {
    CountingEnd::finished = 0;
    Tape tape;
    const std::vector<Tensor> results{result()};
    tape.backward(results, one);
  };
  // The inner pass of a checkpoint is part of the outer one.
  pass([&] {
    return checkpoint(
        [&](const Tensor& in) { return ops::mul(leaves_work(in, may_wait), leaves_work(other, may_wait)); },
        x);
  });
  EXPECT_EQ(CountingEnd::finished, 2);

  may_wait.clear();
  zero_grad(x), zero_grad(other);
  pass([&] { return leaves_work(leaves_work(x, may_wait), may_wait); });
  EXPECT_EQ(CountingEnd::finished, 2);
  EXPECT_EQ(may_wait, (std::vector<bool>{false, true})) << "a result's gradient is read by the next entry";

  may_wait.clear();
  zero_grad(x);
  pass([&] { return ops::add(leaves_work(x, may_wait), leaves_work(x, may_wait)); });
  pass([&] { return leaves_work(x, may_wait); });
  EXPECT_EQ(may_wait, (std::vector<bool>{false, false, false}))
      << "two uses of a leaf; a gradient that is there";

  may_wait.clear();
  on_grad(other, [](const Tensor&) {});
  zero_grad(other);
  pass([&] { return leaves_work(other, may_wait); });
  EXPECT_EQ(may_wait, std::vector<bool>{false}) << "a hook reads it";

  zero_grad(x);
  EXPECT_THROW(pass([&] { return leaves_work(leaves_work(x, may_wait, true), may_wait); }), Error);
  EXPECT_EQ(CountingEnd::finished, 0) << "a pass that throws";
  pass([&] { return leaves_work(x, may_wait); });
  EXPECT_EQ(CountingEnd::finished, 1) << "nothing is left of the one that threw";
}

TEST(Tape, GivenGradientsAreNotScaled) {
  Tensor x = Tensor::from(std::vector<double>{0.5}, {1});
  require_grad(x);
  Tape tape({.loss_scale = Tensor::full({}, 1024, DType::f32, Device::cpu())});
  const Tensor y = ops::relu_squared(x);
  tape.backward(std::vector{y}, std::vector{Tensor::full({1}, 3, DType::f64, Device::cpu())});
  EXPECT_EQ(grad(x).item(), 3);
}

TEST(Tape, FiniteCheckLeavesAnOverflowOfScaledGradientsToTheOptimizer) {
  for (const double scale : {2.0, 1.0}) {
    Tensor x = Tensor::full({2}, 1, DType::f64, Device::cpu());
    require_grad(x);
    Tape tape({.check_finite = true, .loss_scale = Tensor::full({}, scale, DType::f32, Device::cpu())});
    const Tensor y = ops::mean(ops::silu(x));
    const auto backward = [&] {
      Tensor loss = y.detach().clone();
      tape.record("overflow", Site::here(), {&y}, {&loss}, [](Backward& b) {
        b.accumulate(0, Tensor::full({}, INFINITY, DType::f64, Device::cpu()));
      });
      tape.backward(loss);
    };
    if (scale > 1)
      EXPECT_NO_THROW(backward());
    else
      EXPECT_THROW(backward(), Error);
  }
}

TEST(Checkpoint, GivesTheSameGradientAndKeepsOnlyTheInput) {
  const std::vector<double> values{0.3, -1.2, 2.5, 0.7};
  const auto run = [&](bool recompute) {
    Tensor x = Tensor::from(values, {4});
    require_grad(x);
    Tape tape;
    const auto f = [](const Tensor& t) { return ops::gelu(ops::silu(ops::silu(t))); };
    const Tensor y = recompute ? checkpoint(f, x) : f(x);
    if (recompute) {
      EXPECT_EQ(tape.size(), 1u);
    }
    tape.backward(std::vector{y}, std::vector{Tensor::full({4}, 1.0, DType::f64, Device::cpu())});
    return grad(x).to_vector<double>();
  };
  EXPECT_EQ(run(true), run(false));
}

TEST(Gradcheck, CatchesAWrongDerivative) {
  const auto wrong = [](const std::vector<Tensor>& in) {
    Tensor y = ops::silu(in[0].detach());
    if (Tape* tape = Tape::recording(in[0]))
      tape->record("wrong", Site::here(), {&in[0]}, {&y}, [x = Saved(in[0])](Backward& b) {
        Tensor dx = b.grad().clone();  // the slope is left out
        b.accumulate(0, dx);
      });
    return std::vector{y};
  };
  const Tensor x = Tensor::from(std::vector<double>{0.3, -1.2}, {2});
  EXPECT_FALSE(gradcheck(wrong, {x}).ok);
  EXPECT_TRUE(gradcheck([](const auto& in) { return std::vector{ops::silu(in[0])}; }, {x}).ok);
}

}  // namespace
}  // namespace tessera
