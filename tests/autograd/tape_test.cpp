#include "autograd/tape.h"

#include <gtest/gtest.h>

#include <cmath>
#include <memory>
#include <thread>

#include "autograd/checkpoint.h"
#include "autograd/gradcheck.h"
#include "ops/activation/activation.h"
#include "ops/pointwise/pointwise.h"
#include "ops/random/random.h"
#include "ops/reduce/reduce.h"
#include "ops/shape/shape.h"
#include "tensor/kernels.h"
#include "tests/autograd/leaves.h"
#include "tests/errors.h"

namespace tessera {
namespace {

TEST(Tape, RunsAMillionDeepChainWithoutRecursion) {
  const Tensor x = full_leaf({1}, 1.0);
  Tape tape;
  Tensor y = x;
  for (int i = 0; i < 1'000'000; ++i) y = ops::relu(y);
  EXPECT_EQ(tape.size(), 1'000'000u);
  tape.backward(y);
  EXPECT_EQ(grad(x).item<double>(), 1.0);
  EXPECT_EQ(tape.size(), 0u);
}

TEST(Tape, AResultIsNotWritten) {
  Rng rng(1);
  const Tensor x = full_leaf({2, 3}, 1.0);
  Tape tape;
  const Tensor y = ops::relu(x);
  expect_error([&] { y.fill(0.5); }, {"fill: f64[2, 3]", "result of the tape", "detach()"});
  expect_error([&] { y.copy_from(x); }, {"copy_from", "result of the tape"});
  expect_error([&] { ops::fill_uniform(y, 0, 1, rng); }, {"fill_uniform", "result of the tape"});
  y.detach().fill(0.5);
  x.fill(2);  // as an optimizer does
  EXPECT_EQ(y.to_vector<double>(), std::vector<double>(6, 0.5));
}

TEST(Tape, ACopyOfAResultThatWouldLoseItsGradientThrows) {
  Tensor x = Tensor::full({2, 3}, 1.0, DType::f64, Device::cpu());  // its rows are pitched
  require_grad(x);
  Tape tape;
  const Tensor y = ops::relu(x), turned = ops::transpose(y, 0, 1);
  ASSERT_FALSE(y.layout().is_packed());
  expect_error([&] { y.clone(); }, {"clone: f64[2, 3]", "lose its gradient"});
  expect_error([&] { y.packed(); }, {"packed", "lose its gradient"});
  expect_error([&] { turned.with_rows(); }, {"with_rows", "lose its gradient"});
  expect_error([&] { turned.reshaped({6}); }, {"lose its gradient"});
  expect_error([&] { y.permute({1, 0}); }, {"permute", "ops::permute"});
  expect_error([&] { y.select(0, 1); }, {"select", "use ops::select"});
  EXPECT_EQ(y.detach().clone().to_vector<double>(), y.to_vector<double>());
  expect_error([&] { x.clone(); }, {"clone: f64[2, 3]", "requires a gradient", "lose its gradient"});
  expect_error([&] { x.packed(); }, {"packed", "lose its gradient"});
  {
    const NoTape off;
    EXPECT_EQ(x.clone().to_vector<double>(), x.to_vector<double>()) << "nothing is recorded";
  }
  const Tensor scale = full_leaf({1}, 1.0);
  expect_error([&] { tape.backward(scale); }, {"is a parameter, not a result"});
}

// It was written and off the tape, so that the loss lost its gradient without a word.
TEST(Tape, ACopyIntoAPlainTensorThatWouldLoseAGradientThrows) {
  const Tensor x = full_leaf({3}, 2.0);
  const Tensor rows = Tensor::zeros({2, 3}, DType::f64, Device::cpu());
  {
    Tape tape;
    const Tensor y = ops::scale(x, 2);
    expect_error([&] { rows.select(0, 0).copy_from(y); },
                 {"copy_from: f64[3]", "result of the tape", "lose its gradient", "ops::concat", "detach()"});
    expect_error([&] { rows.copy_from(x); }, {"copy_from: f64[3]", "requires a gradient"});
    EXPECT_EQ(rows.to_vector<double>(), std::vector<double>(6, 0));
    rows.select(0, 0).copy_from(y.detach());
    const NoTape off;
    rows.select(0, 1).copy_from(x);
  }
  rows.select(0, 1).copy_from(x);  // nothing is recorded
  EXPECT_EQ(rows.to_vector<double>(), (std::vector<double>{4, 4, 4, 2, 2, 2}));
}

TEST(Tape, AnElementIsReadWhereNoTapeRecords) {
  const Tensor x = full_leaf({2, 3}, 2.0);
  EXPECT_EQ(x.at({1, 2}).item(), 2);
  Tensor y;
  {
    Tape tape;
    y = ops::scale(x, 2);
    expect_error([&] { y.at({0, 0}); }, {"at: f64[2, 3]", "result of the tape", "detach().at("});
    expect_error([&] { x.at({0, 0}); }, {"at: f64[2, 3]", "requires a gradient", "detach().at("});
    EXPECT_EQ(y.detach().at({0, 1}).item(), 4);
  }
  EXPECT_EQ(y.at({0, -1}).item(), 4);
  EXPECT_EQ(y.at({0, 0}).grad_state(), nullptr);
}

// The list of its own thread kept a pointer to it.
TEST(TapeDeathTest, DestroyedOnAnotherThreadEndsTheProcess) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto destroy_elsewhere = [] {
    auto tape = std::make_unique<Tape>();
    std::thread([&] { tape.reset(); }).join();
  };
  EXPECT_DEATH(destroy_elsewhere(), "tape: a tape is destroyed on another thread");
  std::thread([] { const Tape own; }).join();
}

TEST(Tape, BackwardNamesWhatKeptALossFromTheTape) {
  const Tensor x = full_leaf({3}, 2.0);
  const Tensor before = ops::sum(x);
  Tape tape;
  expect_error([&] { tape.backward(before); }, {"f64[]", "before the Tape was made", "copy_from", "NoTape"});
  Tensor inner;
  {
    Tape other;
    inner = ops::sum(x);
  }
  expect_error([&] { tape.backward(inner); }, {"f64[]", "result of another tape", "one Tape per step"});
}

TEST(Tape, AResultOfAnEarlierTapeMustBeDetached) {
  const Tensor weight = leaf({1, 2});
  Tensor state;
  {
    Tape step;
    state = ops::mul(weight, weight);
  }
  Tape step;
  const std::vector<std::string> parts{
      "mul: input f64[2]", "belongs to another tape, such as that of an earlier step", "detach() it"};
  const auto expect = [&](const std::function<void()>& f) {
    const std::string said = message_of(f);
    for (const std::string& part : parts) EXPECT_NE(said.find(part), std::string::npos) << said;
    EXPECT_EQ(said.find("checkpoint"), std::string::npos) << said;
  };
  expect([&] { ops::mul(state, weight); });
  expect([&] { checkpoint([&](const Tensor& x) { return ops::mul(state, x); }, weight); });
  EXPECT_TRUE(ops::mul(state.detach(), weight).defined());
}

TEST(Tape, AConversionThatWouldLoseAGradientNamesTheTensorAndTheWayOut) {
  Tensor leaf = Tensor::full({2, 3}, 1, DType::f32, Device::cpu());
  require_grad(leaf);  // without a tape, of which the message must not speak
  expect_error([&] { leaf.to(DType::f64); },
               {"to: f32[2, 3] on cpu has a gradient", "conversion to f64", "ops::cast"});
  EXPECT_EQ(leaf.detach().to(DType::f64).dtype(), DType::f64);
}

TEST(Tape, AResultDoesNotBecomeALeaf) {
  const Tensor x = full_leaf({2}, 1.0);
  Tape tape;
  Tensor y = ops::relu(x);
  expect_error([&] { require_grad(y); }, {"require_grad: f64[2]", "result of a tape", "retain_grad()"});
  tape.backward(ops::sum(y));
  EXPECT_EQ(grad(x).to_vector<double>(), (std::vector<double>{1, 1}));
}

TEST(Tape, OneThatIsReplacedByTheNextLeavesThatRecording) {
  const Tensor x = full_leaf({1}, 2.0);
  auto tape = std::make_unique<Tape>();
  for (int step = 0; step < 3; ++step) {
    tape = std::make_unique<Tape>();  // made before the former one is destroyed
    const Tensor y = ops::relu_squared(x);
    zero_grad(x);
    tape->backward(y);
    EXPECT_EQ(grad(x).item(), 4) << step;
  }
  tape.reset();
  EXPECT_EQ(Tape::innermost(), nullptr);
}

TEST(Tape, AddsUpTheGradientsOfASharedInput) {
  const Tensor x = full_leaf({3}, 2.0);
  Tape tape;
  const std::vector<Tensor> results{ops::relu_squared(x), ops::relu(x)};
  const std::vector<Tensor> grads(2, Tensor::full({3}, 1.0, DType::f64, Device::cpu()));
  tape.backward(results, grads);
  EXPECT_EQ(grad(x).to_vector<double>(), (std::vector<double>{5, 5, 5}));
}

/// y = 3 x, whose backward adds to x's gradient in place wherever it may, after it passed its own on to
/// `other`, if that is to get it.
Tensor tripled(const Tensor& x, const Tensor& other, bool& in_place) {
  Tensor y = ops::scale(x.detach(), 3);
  Tape::recording(x)->record("tripled", {&x, &other}, {&y}, [&in_place](Backward& b) {
    const Tensor dx = ops::scale(b.grad(), 3);
    if (b.needs(1)) b.pass(0, {1});
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

TEST(Tape, AGradientIsAddedToInPlaceOnlyWhereNoOtherResultReadsIt) {
  for (const bool passes : {false, true}) {
    const Tensor x = full_leaf({3}, 2.0);
    Tape tape;
    const Tensor middle = ops::relu(x);
    bool in_place = false;
    Tensor y = tripled(middle, passes ? middle : Tensor(), in_place);
    if (!passes) y = ops::add(middle, y);  // one dsum for both: y's is read when middle's could be added to
    tape.backward(ops::sum(y));
    EXPECT_EQ(in_place, passes);
    EXPECT_EQ(grad(x).to_vector<double>(), (std::vector<double>{4, 4, 4}));
  }
}

/// y = x, whose backward gives a gradient of its own, the tensor `made`, or lets it be read.
Tensor ones_for(const Tensor& x, bool gives, const void*& made) {
  Tensor y = x.detach().clone();
  Tape::recording(x)->record("ones_for", {&x}, {&y}, [gives, &made](Backward& b) {
    Tensor dx = Tensor::full({3}, 1, DType::f64, Device::cpu());
    made = dx.raw();
    if (!gives) return b.accumulate(0, dx);
    b.give(0, std::move(dx));
  });
  return y;
}

TEST(Tape, OnlyAGivenGradientIsAddedToInPlace) {
  for (const bool gives : {false, true}) {
    const Tensor x = full_leaf({3}, 2.0);
    Tape tape;
    const Tensor middle = ops::relu(x);
    retain_grad(middle);
    const void *first = nullptr, *second = nullptr;
    const Tensor early = ones_for(middle, false, second), late = ones_for(middle, gives, first);
    const Tensor one = Tensor::full({3}, 1.0, DType::f64, Device::cpu());
    tape.backward(std::vector{early, late}, std::vector{one, one});
    EXPECT_EQ(grad(middle).raw() == first, gives);
    EXPECT_EQ(grad(x).to_vector<double>(), (std::vector<double>{2, 2, 2}));
  }
}

TEST(Tape, AddsToWhatIsGivenWhereTheFirstGradientIsReadByOthers) {
  const Tensor x = full_leaf({3}, 2.0);
  Tape tape;
  const Tensor middle = ops::relu(x);
  retain_grad(middle);
  const void *first = nullptr, *second = nullptr;
  const Tensor early = ones_for(middle, true, second), late = ones_for(middle, false, first);
  const Tensor one = Tensor::full({3}, 1.0, DType::f64, Device::cpu());
  tape.backward(std::vector{early, late}, std::vector{one, one});
  EXPECT_EQ(grad(middle).raw(), second);
  EXPECT_EQ(grad(x).to_vector<double>(), (std::vector<double>{2, 2, 2}));
}

/// y = x, whose backward gives ones [3] with their column sums, if those are wanted.
Tensor summed_ones_for(const Tensor& x, bool& wanted) {
  Tensor y = x.detach().clone();
  Tape::recording(x)->record("summed_ones_for", {&x}, {&y}, [&wanted](Backward& b) {
    wanted = b.wants_column_sums(0);
    Tensor dx = Tensor::full({3}, 1, DType::f64, Device::cpu());
    if (!wanted) return b.give(0, std::move(dx));
    b.give_summed(0, std::move(dx), Tensor::full({1, 3}, 1, DType::f64, Device::cpu()));
  });
  return y;
}

/// y = x, which asks for column sums of its gradient if `asks` and says whether they came.
Tensor asking_for_sums(const Tensor& x, bool asks, bool& came) {
  Tensor y = x.detach().clone();
  Tape::recording(x)->record("asking_for_sums", {&x}, {&y}, [&came](Backward& b) {
    came = b.column_sums().defined();
    b.accumulate(0, b.grad());
  });
  if (asks) want_column_sums(y);
  return y;
}

TEST(Tape, ColumnSumsTravelWithAGradientThatNothingIsAddedTo) {
  const Tensor one = Tensor::full({3}, 1.0, DType::f64, Device::cpu());
  struct Case {
    bool asks, summed_first, alone, wanted, came;
  };
  for (const Case& of : {Case{true, true, true, true, true}, Case{false, true, true, false, false},
                         Case{true, true, false, true, false}, Case{true, false, false, false, false}}) {
    const Tensor x = full_leaf({3}, 2.0);
    Tape tape;
    bool came = false, wanted = false;
    const void* made = nullptr;
    const Tensor middle = asking_for_sums(x, of.asks, came);
    std::vector<Tensor> results, grads;
    if (!of.alone && of.summed_first) results.push_back(ones_for(middle, true, made));
    results.push_back(summed_ones_for(middle, wanted));  // backward begins with the last entry
    if (!of.alone && !of.summed_first) results.push_back(ones_for(middle, true, made));
    grads.assign(results.size(), one);
    tape.backward(results, grads);
    EXPECT_EQ(wanted, of.wanted);
    EXPECT_EQ(came, of.came);
    const double expected = of.alone ? 1 : 2;
    EXPECT_EQ(grad(x).to_vector<double>(), (std::vector<double>(3, expected)));
  }
}

TEST(Tape, ColumnSumsOfAGradientThatIsRoundedAreDropped) {
  const Tensor x = full_leaf({3}, 2.0);
  Tape tape;
  bool came = false;
  const Tensor middle = asking_for_sums(x, true, came);
  Tensor y = middle.detach().clone();
  Tape::recording(middle)->record("gives_f32", {&middle}, {&y}, [](Backward& b) {
    b.give_summed(0, Tensor::full({3}, 1, DType::f32, Device::cpu()),
                  Tensor::full({1, 3}, 1, DType::f32, Device::cpu()));
  });
  tape.backward(std::vector{y}, std::vector{Tensor::full({3}, 1.0, DType::f64, Device::cpu())});
  EXPECT_FALSE(came);
}

TEST(Tape, SecondBackwardThrows) {
  const Tensor x = full_leaf({1}, 2.0);
  Tape tape;
  const Tensor y = ops::relu(x);
  tape.backward(y);
  EXPECT_THROW(tape.backward(y), Error);
  EXPECT_THROW(ops::relu(x), Error);
}

TEST(Tape, WritingASavedTensorInPlaceIsNoticed) {
  const Tensor x = full_leaf({4}, 2.0);
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

TEST(Tape, FiniteCheckNamesOperatorLayerAndLine) {
  const Tensor x = full_leaf({2, 3}, 1e300);
  Tape tape({.check_finite = true});
  const CallScope call(Site::here(), "blocks.3.mlp");
  expect_parts(report_of([&] { ops::relu_squared(x); }),
               {"relu_squared", "in blocks.3.mlp", "f64[2, 3]", "tape_test.cpp:"});
}

TEST(Tape, FiniteCheckLooksAtNoMemoryWithoutAGradient) {
  // w's buffer holds NaN of an earlier step, which zero_grad forgot; its entry gives a gradient to x alone.
  Tensor x = Tensor::full({3}, 1, DType::f64, Device::cpu()), w = x.clone();
  require_grad(x), require_grad(w);
  set_grad_buffer(w, Tensor::full({3}, std::nan(""), DType::f64, Device::cpu()));
  zero_grad(w);
  Tape tape({.check_finite = true});
  Tensor y = Tensor::full({3}, 1, DType::f64, Device::cpu());
  tape.record("first of two", {&x, &w}, {&y}, [](Backward& b) { b.accumulate(0, b.grad()); });
  tape.backward(ops::sum(y));
  EXPECT_EQ(grad(x).to_vector<double>(), std::vector<double>(3, 1.0));
  EXPECT_FALSE(grad(w).defined());
}

std::string here(int line) {
  return "; called at " + std::string(__FILE__) + ":" + std::to_string(line);
}

TEST(Tape, AnErrorNamesTheUsersLine) {
  const Tensor x = Tensor::zeros({2, 3}, DType::f64, Device::cpu());
  int line = 0;
  const std::string said = report_of([&] {
    line = __LINE__ + 1;
    ops::add(x, Tensor::zeros({4}, DType::f64, Device::cpu()));
  });
  EXPECT_TRUE(said.ends_with(here(line))) << said;
  // Each call of an expression has its own line.
  const std::string inner = report_of([&] {
    line = __LINE__ + 2;
    ops::relu(  // not this one
        ops::add(x, Tensor::zeros({4}, DType::f64, Device::cpu())));
  });
  EXPECT_TRUE(inner.ends_with(here(line))) << inner;
  EXPECT_EQ(CallScope::current().site.file, nullptr) << "nothing is left of a call that threw";
  // A function that the user gives checkpoint() is the user's code, one that a layer gives it is not.
  Tensor leaf = x.clone();
  require_grad(leaf);
  Tape tape;
  const auto f = [&](const Tensor& t) {
    line = __LINE__ + 1;
    return ops::mul(t, Tensor());
  };
  const std::string within = report_of([&] { checkpoint(f, leaf); });
  EXPECT_TRUE(within.ends_with(here(line))) << within;
  const Site user = Site::here();
  const std::string in_a_layer = report_of([&] {
    const CallScope layer(user);
    checkpoint(f, leaf);
  });
  EXPECT_TRUE(in_a_layer.ends_with(here(user.line))) << in_a_layer;
}

TEST(Tape, AnErrorInBackwardNamesTheLineAndTheLayerOfTheForwardCall) {
  const Tensor x = full_leaf({4}, 2.0);
  Tape tape;
  Tensor y;
  const int line = __LINE__ + 3;
  {
    const CallScope layer(Site(), "blocks.3.mlp");
    y = ops::silu(x);
  }
  const Tensor loss = ops::sum(y);
  x.fill(1.0);
  const std::string said = report_of([&] { tape.backward(loss); });
  EXPECT_NE(said.find("backward of silu"), std::string::npos) << said;
  EXPECT_TRUE(said.ends_with(here(line) + " in blocks.3.mlp")) << said;
  Tape next;
  const std::string other = report_of([&] { next.backward(Tensor()); });
  EXPECT_TRUE(other.ends_with(here(__LINE__ - 1))) << other;
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
    tape->record("leaves_work", {&x}, {&y}, [&may_wait, fails](Backward& b) {
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
    const Tensor x = full_leaf({2}, 1);
    Tape tape({.check_finite = true, .loss_scale = Tensor::full({}, scale, DType::f32, Device::cpu())});
    const Tensor y = ops::mean(ops::silu(x));
    const auto backward = [&] {
      Tensor loss = y.detach().clone();
      tape.record("overflow", {&y}, {&loss}, [](Backward& b) {
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

/// Backward of an operator "mine" with one input f64[3], which `hands_over` calls.
void pass_of_mine(const std::function<void(Backward&)>& hands_over) {
  Tensor x = Tensor::full({3}, 2.0, DType::f64, Device::cpu()), y = x.clone();
  require_grad(x);
  Tape tape;
  tape.record("mine", {&x}, {&y}, [&](Backward& b) { hands_over(b); });
  tape.backward(ops::sum(y));
}

TEST(Tape, RefusesAGradientThatIsNotOfItsInput) {
  const auto made = [](const Shape& shape, DType dtype) {
    return Tensor::full(shape, 1, dtype, Device::cpu());
  };
  const auto refused = [](const std::string& got, auto&& hands_over) {
    expect_error([&] { pass_of_mine(hands_over); },
                 {"backward of mine: gradient of input 0 is ", got.c_str(), "expected f64[3] on cpu"});
  };
  refused("f64[2] on cpu", [&](Backward& b) { b.accumulate(0, made({2}, DType::f64)); });
  refused("f64[2] on cpu", [&](Backward& b) { b.give(0, made({2}, DType::f64)); });
  refused("f64[1] on cpu", [&](Backward& b) { b.accumulate(0, made({1}, DType::f64)); });
  refused("i64[3] on cpu", [&](Backward& b) { b.accumulate(0, made({3}, DType::i64)); });
  refused("(undefined)", [&](Backward& b) { b.accumulate(0, Tensor()); });
  refused("(undefined)", [&](Backward& b) { b.give(0, Tensor()); });
  refused("f64[2, 3] on cpu", [&](Backward& b) { b.written(0, {made({2, 3}, DType::f64)}); });
  expect_error([&] { pass_of_mine([&](Backward& b) { b.accumulate(1, made({3}, DType::f64)); }); },
               {"backward of mine: there is no input 1", "recorded with 1"});
  expect_error([&] { pass_of_mine([&](Backward& b) { b.accumulate(-1, made({3}, DType::f64)); }); },
               {"backward of mine: there is no input -1"});
  expect_error([&] { pass_of_mine([&](Backward& b) { b.accumulate(0, b.grad(1)); }); },
               {"backward of mine: there is no output 1"});
  // Another floating dtype is added in the gradient's own, and what is not needed is not looked at.
  pass_of_mine([&](Backward& b) { b.accumulate(0, made({3}, DType::f32)); });
}

TEST(Tape, SaysHowToEvaluateAfterItsBackwardPass) {
  const Tensor x = full_leaf({3}, 2.0);
  Tape tape;
  tape.backward(ops::sum(x));
  expect_error([&] { ops::scale(x, 2); }, {"scale: this tape has run backward already", "a NoTape around"});
  const NoTape off;
  EXPECT_EQ(ops::sum(ops::scale(x, 2)).item(), 12);
}

TEST(Tape, OutputsOfIntegersHaveNoGradient) {
  const Tensor x = Tensor::from(std::vector<double>{3, 1, 2}, {3});
  Tensor leaf = x.detach();
  require_grad(leaf);
  Tape tape;
  Tensor sorted = Tensor::from(std::vector<double>{1, 2, 3}, {3});
  Tensor order = Tensor::from(std::vector<int64_t>{1, 2, 0}, {3});
  std::vector<bool> has;
  tape.record("sort", {&leaf}, {&order, &sorted}, [&has](Backward& b) {
    has = {b.has_grad(0), b.has_grad(1)};
    b.accumulate(0, b.grad(1));
  });
  EXPECT_FALSE(requires_grad(order));
  EXPECT_TRUE(requires_grad(sorted));
  EXPECT_EQ(order.clone().to_vector<int64_t>(), (std::vector<int64_t>{1, 2, 0})) << "a copy loses nothing";
  tape.backward(ops::sum(sorted));
  EXPECT_EQ(has, (std::vector<bool>{false, true}));
  EXPECT_EQ(grad(leaf).to_vector<double>(), std::vector<double>(3, 1.0));
}

TEST(Tape, RefusesAnOutputThatIsUndefined) {
  Tensor x = Tensor::full({3}, 2.0, DType::f64, Device::cpu()), y = x.detach(), none;
  require_grad(x);
  Tape tape;
  expect_error(
      [&] {
        tape.record("mine", {&x}, {&y, &none}, [](Backward&) {});
      },
      {"mine: output 1 is undefined"});
  EXPECT_FALSE(requires_grad(y));
}

TEST(Tape, RefusesAnOutputThatIsAnInput) {
  Tensor x = full_leaf({3}, 2.0);
  Tape tape;
  const auto twice = [](Backward& b) { b.accumulate(0, ops::scale(b.grad(), 2)); };
  expect_error([&] { tape.record("mine", {&x}, {&x}, twice); },
               {"mine: output 0 is input 0, f64[3]", "would be lost", "detach()"});
  EXPECT_EQ(x.grad_state()->tape, 0u) << "still a leaf";
  Tensor y = x.detach();
  tape.record("mine", {&x}, {&y}, twice);
  tape.backward(ops::sum(y));
  EXPECT_EQ(grad(x).to_vector<double>(), std::vector<double>(3, 2.0));
}

TEST(Tape, RefusesGradientsOfResultsThatAreNone) {
  const Tensor x = full_leaf({3}, 2.0);
  Tape tape;
  const std::vector<Tensor> results{ops::sum(x)};
  const auto given = [&](const Tensor& gradient) {
    return [&, gradient] { tape.backward(results, std::vector{gradient}); };
  };
  expect_error(given(Tensor()), {"backward: gradient", "for a result f64[]", "expected a floating tensor"});
  expect_error(given(Tensor::full({}, 1, DType::i64, Device::cpu())), {"backward: gradient i64[]"});
  expect_error(given(Tensor::full({1}, 1, DType::f64, Device::cpu())), {"backward: gradient f64[1]"});
  given(Tensor::full({}, 3, DType::f64, Device::cpu()))();
  EXPECT_EQ(grad(x).to_vector<double>(), std::vector<double>(3, 3));
}

TEST(Gradcheck, SaysWhichInputsItNeeds) {
  const auto f = [](const std::vector<Tensor>& in) { return std::vector{ops::silu(in[0])}; };
  const Tensor narrow = Tensor::full({2}, 1, DType::f32, Device::cpu()), wide = narrow.to(DType::f64);
  expect_error([&] { gradcheck(f, {narrow}); }, {"gradcheck: no input is f64; only such"});
  expect_error([&] { gradcheck(f, {wide}, {false}); }, {"gradcheck: no input is f64 and differentiable"});
  expect_error(
      [&] {
        gradcheck(f, {wide}, {true, true});
      },
      {"gradcheck: differentiable has 2 entries for 1"});
}

TEST(Gradcheck, LeavesTheGradientsOfParametersAsTheyWere) {
  Tensor used = Tensor::full({3}, 2.0, DType::f64, Device::cpu()), fresh = used.clone();
  require_grad(used), require_grad(fresh);
  const auto f = [&](const std::vector<Tensor>& in) {
    return std::vector{ops::mul(ops::mul(in[0], used), fresh)};
  };
  const Tensor x = Tensor::full({3}, 0.5, DType::f64, Device::cpu());
  Tape outer;
  const Tensor loss = ops::sum(used);
  EXPECT_TRUE(gradcheck(f, {x}).ok);
  EXPECT_EQ(outer.size(), 1u);
  outer.backward(loss);
  EXPECT_EQ(grad(used).to_vector<double>(), std::vector<double>(3, 1.0));
  EXPECT_TRUE(gradcheck(f, {x}).ok);
  EXPECT_EQ(grad(used).to_vector<double>(), std::vector<double>(3, 1.0));
  EXPECT_FALSE(grad(fresh).defined());
}

TEST(Gradcheck, CatchesAWrongDerivative) {
  const auto wrong = [](const std::vector<Tensor>& in) {
    Tensor y = ops::silu(in[0].detach());
    if (Tape* tape = Tape::recording(in[0]))
      tape->record("wrong", {&in[0]}, {&y}, [x = Saved(in[0])](Backward& b) {
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
