#include <gtest/gtest.h>

#include "autograd/checkpoint.h"
#include "autograd/gradcheck.h"
#include "autograd/gradient.h"
#include "autograd/on_record.h"
#include "autograd/tape.h"
#include "ops/activation/activation.h"
#include "ops/cast/cast.h"
#include "ops/pointwise/pointwise.h"
#include "ops/reduce/reduce.h"
#include "ops/shape/shape.h"
#include "tensor/kernels.h"
#include "tests/autograd/leaves.h"
#include "tests/errors.h"

/// Leaves and what arrives there: hooks, buffers, accumulation, memory.

namespace tessera {
namespace {

TEST(Hook, RunsOnceWhenTheLastGradientHasArrived) {
  const Tensor x = leaf({1, 2});
  std::vector<std::vector<double>> seen;
  size_t entries_left = 99;
  Tape* current = nullptr;
  on_grad(x, [&](const Tensor& grad) {
    seen.push_back(values(grad));
    entries_left = current->size();
  });
  for (int step = 0; step < 2; ++step) {
    zero_grad(x);
    Tape tape;
    current = &tape;
    const Tensor early = ops::mul(x, x);                    // the same leaf twice in one entry
    const Tensor late = ops::add(ops::scale(x, 3), early);  // and once more
    const Tensor after = ops::relu(ops::relu(late));
    tape.backward(ops::sum(after));
    ASSERT_EQ(seen.size(), size_t(step) + 1);
    EXPECT_EQ(seen.back(), (std::vector<double>{2 * 1 + 3, 2 * 2 + 3}));
    EXPECT_EQ(entries_left, 0u) << "the first entry of the forward pass is the last to run";
  }
}

TEST(Hook, RunsAsSoonAsTheLeafIsDone) {
  // Data parallel reduces a late layer's gradient while earlier layers still run.
  const Tensor x = leaf({1, 2}), weight = leaf({3, 4});
  size_t entries_left = 0;
  Tape tape;
  on_grad(weight, [&](const Tensor&) { entries_left = tape.size(); });
  const Tensor h = ops::relu(ops::relu(x));
  tape.backward(ops::sum(ops::mul(h, weight)));
  EXPECT_EQ(entries_left, 2u);
}

TEST(Hook, DoesNotRunWithoutAGradientOfThisPass) {
  const Tensor x = leaf({1, 2}), unused = leaf({5, 6});
  int calls = 0;
  on_grad(unused, [&](const Tensor&) { calls += 1; });
  {
    Tape tape;
    tape.backward(ops::sum(ops::mul(x, unused)));
  }
  EXPECT_EQ(calls, 1);
  {
    Tape tape;
    const Tensor dead = ops::relu(unused);  // recorded, but nothing of it reaches the loss
    tape.backward(ops::sum(ops::relu(x)));
  }
  EXPECT_EQ(calls, 1) << "the gradient of the pass before is no news";
  {
    Tape tape;
    const Tensor dropped = ops::relu(unused);
  }
  EXPECT_EQ(calls, 1) << "no backward pass at all";
}

TEST(Hook, DoesNotRunAfterAnErrorAndMayThrowItself) {
  Tensor x = leaf({1, 2});
  int calls = 0;
  bool fail = false;
  on_grad(x, [&](const Tensor&) {
    calls += 1;
    check(!fail, "planted in the hook");
  });
  {
    Tape tape;
    const Tensor early = ops::silu(x), saved = ops::scale(x, 1);
    const Tensor bad = ops::silu(saved);
    const Tensor loss = ops::sum(ops::add(ops::relu(x), ops::add(early, bad)));
    saved.detach().fill(0);  // its backward throws after relu(x) has given its gradient
    EXPECT_NE(message_of([&] { tape.backward(loss); }), "");
  }
  EXPECT_EQ(calls, 0);
  EXPECT_FALSE(grad(x).defined());
  fail = true;
  {
    Tape tape;
    const Tensor y = ops::mul(x, x);
    const Tensor z = ops::mul(y, y);
    EXPECT_EQ(message_of([&] { tape.backward(ops::sum(z)); }), "planted in the hook");
  }
  fail = false;
  EXPECT_FALSE(grad(x).defined());
  Tape tape;
  tape.backward(ops::sum(ops::mul(x, x)));
  EXPECT_EQ(values(grad(x)), (std::vector<double>{2, 4}));
  EXPECT_EQ(calls, 2);
}

TEST(Hook, RunsWhateverOtherTapesRecorded) {
  const Tensor x = leaf({1, 2}), w = leaf({7.6, 7.6});
  int calls = 0;
  on_grad(w, [&](const Tensor&) { calls += 1; });
  Tape waiting;
  const Tensor later = ops::sum(ops::mul(w, w));
  {
    Tape tape;
    tape.backward(ops::sum(ops::mul(w, w)));
    EXPECT_EQ(calls, 1) << "a tape that waits";
  }
  waiting.backward(later);
  EXPECT_EQ(calls, 2);

  // A pass that failed before it came to w, whose tape still lives while the step is made again.
  Tape failed;
  const Tensor h = ops::scale(w, 1), bad = ops::silu(h);
  h.detach().fill(0);
  EXPECT_NE(message_of([&] { failed.backward(ops::sum(bad)); }), "");
  EXPECT_EQ(calls, 2);
  Tape again;
  again.backward(ops::sum(ops::mul(w, w)));
  EXPECT_EQ(calls, 3);
  EXPECT_EQ(w.grad_state()->pending, 0);
}

TEST(Hook, IsRefusedOnAResult) {
  const Tensor x = leaf({1});
  Tape tape;
  const Tensor y = ops::relu(x);
  expect_parts(message_of([&] { on_grad(y, [](const Tensor&) {}); }), {"on_grad", "not a leaf"});
  expect_parts(message_of([&] { on_grad(Tensor::zeros({1}, DType::f64, kCpu), {}); }),
               {"require_grad first"});
  expect_error([&] { on_grad(x, {}); }, {"on_grad", "is empty"});
}

TEST(Leaf, GradientsAddUpOverTapesUntilZeroGrad) {
  const Tensor x = leaf({1, 2});
  EXPECT_FALSE(grad(x).defined());
  for (int micro = 0; micro < 3; ++micro) {
    Tape tape;
    tape.backward(ops::sum(ops::scale(x, micro + 1)));
  }
  EXPECT_EQ(values(grad(x)), (std::vector<double>{6, 6}));
  const void* const place = grad(x).raw();
  zero_grad(x);
  EXPECT_FALSE(grad(x).defined());
  Tape tape;
  tape.backward(ops::sum(ops::scale(x, 5)));
  EXPECT_EQ(values(grad(x)), (std::vector<double>{5, 5}));
  EXPECT_EQ(grad(x).raw(), place) << "captured graphs and collectives hold on to the address";
}

TEST(Leaf, ABufferOfItsOwnIsUsedFromThenOn) {
  const Tensor x = leaf({1, 2});
  {
    Tape tape;
    tape.backward(ops::sum(x.rank() ? ops::scale(x, 2) : x));
  }
  const Tensor arena = Tensor::zeros({10}, DType::f64, kCpu);
  set_grad_buffer(x, arena.slice(0, 4, 6));
  EXPECT_EQ(values(arena), (std::vector<double>{0, 0, 0, 0, 2, 2, 0, 0, 0, 0}))
      << "what had arrived moves along";
  {
    Tape tape;
    tape.backward(ops::sum(ops::scale(x, 3)));
  }
  EXPECT_EQ(values(arena), (std::vector<double>{0, 0, 0, 0, 5, 5, 0, 0, 0, 0}));
  zero_grad(x);
  {
    Tape tape;
    tape.backward(ops::sum(ops::slice(x, 0, 1, 2)));
  }
  EXPECT_EQ(values(arena), (std::vector<double>{0, 0, 0, 0, 0, 1, 0, 0, 0, 0}));
  expect_parts(message_of([&] { set_grad_buffer(x, arena); }), {"set_grad_buffer", "f64[10]", "f64[2]"});
  expect_parts(message_of([&] { set_grad_buffer(x, Tensor::zeros({2}, DType::f32, kCpu)); }), {"f32[2]"});
  expect_parts(message_of([&] { set_grad_buffer(x, Tensor()); }), {"undefined"});
}

/// An operator whose backward is given, with outputs that are copies of the first input.
template <class F>
Tensor custom(const Tensor& a, const Tensor& b, F backward) {
  Tensor y = a.detach().clone();
  Tape::innermost()->record("custom", {&a, &b}, {&y}, std::move(backward));
  return y;
}

/// Of a and w, whose backward adds 100 to a's gradient before it has finished reading its own.
Tensor adds_before_it_reads(const Tensor& a, const Tensor& w) {
  return custom(a, w, [](Backward& b) {
    const Tensor dz = b.grad();
    b.accumulate(0, Tensor::full({2}, 100, DType::f64, kCpu));
    b.accumulate(1, dz);
  });
}

TEST(Leaf, NeverSharesMemoryWithAnotherGradient) {
  // The first operator passes one gradient to the leaf and to z, whose backward then adds to it in place.
  const Tensor a = leaf({2, 3}), w = leaf({5, 7});
  Tape tape;
  const Tensor z = adds_before_it_reads(a, w);
  const Tensor y = custom(a, z, [](Backward& b) {
    const Tensor dy = b.grad();
    b.accumulate(0, dy);
    b.accumulate(1, dy);
  });
  tape.backward(ops::sum(ops::scale(y, 1)));
  EXPECT_EQ(values(grad(a)), (std::vector<double>{101, 101}));
  EXPECT_EQ(values(grad(w)), (std::vector<double>{1, 1}));
}

TEST(Leaf, DoesNotTakeOverTheCallersGradient) {
  const Tensor x = leaf({2, 3}), given = Tensor::from(std::vector<double>{1, 10}, {2});
  for (int step = 0; step < 2; ++step) {
    Tape tape;
    const Tensor y = ops::reshape(x, {1, 2});
    tape.backward(std::vector{y}, std::vector{given.reshape({1, 2})});
  }
  EXPECT_EQ(values(grad(x)), (std::vector<double>{2, 20}));
  EXPECT_EQ(values(given), (std::vector<double>{1, 10}));
}

TEST(Leaf, AdoptsAGivenGradientWithoutACopy) {
  const Tensor x = leaf({1, 2, 3});
  Tensor y = x.detach().clone();
  const void* made = nullptr;
  Tape tape;
  tape.record("identity", {&x}, {&y}, [&made](Backward& b) {
    Tensor dx = b.grad().clone();
    made = dx.raw();
    b.give(0, std::move(dx));
  });
  tape.backward(std::vector{y}, std::vector{Tensor::from(std::vector<double>{4, 5, 6}, {3})});
  EXPECT_EQ(grad(x).raw(), made);
  EXPECT_EQ(values(grad(x)), (std::vector<double>{4, 5, 6}));
}

TEST(Leaf, SharesWhatItAdoptsWithNoOtherInput) {
  // As above, but the gradient is fresh: the leaf may keep its memory, so z must get a copy.
  const Tensor a = leaf({2, 3}), w = leaf({5, 7});
  Tape tape;
  const Tensor z = adds_before_it_reads(a, w);
  const Tensor y = custom(a, z, [](Backward& b) { b.give({0, 1}, b.grad().clone()); });
  tape.backward(ops::sum(ops::scale(y, 1)));
  EXPECT_EQ(values(grad(a)), (std::vector<double>{101, 101}));
  EXPECT_EQ(values(grad(w)), (std::vector<double>{1, 1}));
}

TEST(Tape, AddsToACopyOfAGradientThatAnotherResultShares) {
  const Tensor x = leaf({1, 2}), w = leaf({3, 4});
  Tape tape;
  const Tensor z = ops::scale(x, 1), v = ops::scale(w, 1), again = ops::scale(z, 100);
  const Tensor y = custom(z, v, [](Backward& b) {
    b.accumulate(0, b.grad());
    b.accumulate(1, b.grad());
  });
  tape.backward(ops::sum(ops::add(y, again)));  // y's backward runs first, then z's gradient gets 100 more
  EXPECT_EQ(values(grad(x)), (std::vector<double>{101, 101}));
  EXPECT_EQ(values(grad(w)), (std::vector<double>{1, 1}));
}

TEST(Tape, AddsToAGradientThatArrivedAsAnExpandedView) {
  // The second gradient must not be added through strides of 0.
  const Tensor x = leaf({1, 2, 3});
  Tape tape;
  const Tensor h = ops::scale(x, 1);
  const Tensor squares = ops::mul(h, h);
  const Tensor spread = custom(
      h, Tensor(), [](Backward& b) { b.accumulate(0, Tensor::full({1}, 10, DType::f64, kCpu).expand({3})); });
  tape.backward(ops::sum(ops::add(squares, spread)));
  EXPECT_EQ(values(grad(x)), (std::vector<double>{12, 14, 16}));
}

TEST(Leaf, Bf16WithAnF32GradientAddsInF32) {
  Tensor x = Tensor::full({1}, 1, DType::bf16, kCpu);
  require_grad(x, DType::f32);
  for (int step = 0; step < 9; ++step) {
    Tape tape;
    tape.backward(ops::sum(ops::scale(x, step == 0 ? 256 : 1)));  // 256 + 1 is not a bf16
  }
  EXPECT_EQ(grad(x).dtype(), DType::f32);
  EXPECT_EQ(grad(x).item<double>(), 264);
  Tensor index = Tensor::zeros({1}, DType::i64, kCpu);
  expect_parts(message_of([&] { require_grad(index); }), {"require_grad", "i64[1]", "floating"});
}

TEST(RetainGrad, KeepsAResultsGradientWhole) {
  const Tensor x = leaf({1, 2});
  Tape tape;
  const Tensor h = ops::scale(x, 2), y = ops::reshape(h, {2, 1});
  retain_grad(h);
  retain_grad(y);
  const Tensor loss = ops::sum(ops::add(ops::mul(y, y), ops::reshape(x, {2, 1})));
  tape.backward(loss);
  EXPECT_EQ(values(grad(h)), (std::vector<double>{4, 8}));
  EXPECT_EQ(values(grad(y)), (std::vector<double>{4, 8}));
  EXPECT_EQ(values(grad(x)), (std::vector<double>{9, 17}));
  expect_error([&] { grad(loss); }, {"grad: f64[]", "result of the tape", "retain_grad()"});
}

// ---- tapes ----

TEST(Tape, EndsWithinANoTapeThatBeganAfterIt) {
  const Tensor x = leaf({1, -2});
  auto outer = std::make_unique<Tape>(), inner = std::make_unique<Tape>();
  {
    const NoTape off;
    const NoTape nested;
    outer = nullptr;
  }
  EXPECT_EQ(Tape::innermost(), inner.get());
  {
    const NoTape off;
    {
      Tape tape;
      const NoTape nested;
      inner = nullptr;
    }
    EXPECT_EQ(Tape::innermost(), nullptr);
  }
  EXPECT_EQ(Tape::innermost(), nullptr);
  EXPECT_FALSE(requires_grad(ops::relu(x))) << "no tape, no recording";
}

TEST(Tape, RecordsNothingWithoutNeedAndNothingUnderNoTape) {
  const Tensor x = leaf({1, -2}), plain = Tensor::full({2}, 3, DType::f64, kCpu);
  EXPECT_FALSE(requires_grad(ops::relu(x))) << "no tape, no recording";
  Tape tape;
  ops::relu(plain);
  EXPECT_EQ(tape.size(), 0u);
  {
    const NoTape off;
    EXPECT_EQ(Tape::innermost(), nullptr);
    EXPECT_FALSE(requires_grad(ops::relu(x)));
    {
      Tape inner;  // a tape inside NoTape is on its own
      inner.backward(ops::sum(ops::relu(x)));
    }
    EXPECT_EQ(Tape::innermost(), nullptr);
  }
  EXPECT_EQ(Tape::innermost(), &tape);
  EXPECT_EQ(values(grad(x)), (std::vector<double>{1, 0}));
  EXPECT_TRUE(requires_grad(ops::relu(x)));
}

TEST(Tape, UnusedOutputsCostNothingAndChangeNothing) {
  const Tensor x = leaf({1, 2});
  Tape tape;
  const Tensor used = ops::scale(x, 3), unused = ops::exp(x);
  const Tensor also_unused = ops::mul(unused, used);
  std::vector<std::string> ran;
  tape.on_entry([&](const char* name, size_t) { ran.push_back(name); });
  tape.backward(ops::sum(used));
  EXPECT_EQ(values(grad(x)), (std::vector<double>{3, 3}));
  EXPECT_EQ(ran.size(), 4u) << "entries pass, though those without a gradient do not run";
}

TEST(Tape, AScopeSeesWhatIsRecordedAndItsLayer) {
  const Tensor x = leaf({1, 2});
  std::vector<std::string> recorded, ran;
  const auto note = [&](const char* name, size_t index) {
    const char* const layer = CallScope::current().module;
    recorded.push_back(std::to_string(index) + name + (layer ? layer : ""));
  };
  Tape tape;
  Tensor y;
  {
    const OnRecord outer(note);
    const Tensor h = ops::scale(x, 3);
    {
      const CallScope layer(Site::here(), intern_name("blocks.0"));
      const OnRecord inner([&](const char*, size_t) { recorded.push_back("inner"); });
      y = ops::mul(h, h);
    }
    {
      const CallScope layer(Site::here(), intern_name("blocks.1"));
      y = ops::sum(y);
    }
    const NoTape off;
    ops::scale(x, 2);
  }
  y = ops::scale(y, 2);  // after its end
  tape.on_entry([&](const char* name, size_t index) { ran.push_back(std::to_string(index) + name); });
  tape.backward(y);
  EXPECT_EQ(recorded, (std::vector<std::string>{"0scale", "inner", "2sumblocks.1"}));
  EXPECT_EQ(ran, (std::vector<std::string>{"3scale", "2sum", "1mul", "0scale"}));
}

TEST(Tape, NestedTapesAreKeptApart) {
  const Tensor x = leaf({2});
  Tape outer;
  const Tensor h = ops::mul(x, x);
  {
    Tape inner;
    expect_parts(message_of([&] { outer.backward(h); }), {"innermost"});
    expect_parts(message_of([&] { ops::relu(h); }), {"relu", "another tape"});
    const Tensor y = ops::scale(x, 5);  // leaves are free to all
    expect_parts(message_of([&] { inner.backward(h); }), {"backward", "another tape"});
    inner.backward(y);
    EXPECT_EQ(values(grad(x)), (std::vector<double>{5}));
  }
  outer.backward(h);
  EXPECT_EQ(values(grad(x)), (std::vector<double>{9}));
}

TEST(Tape, BackwardSaysWhatItCannotDo) {
  const Tensor x = leaf({1, 2});
  Tape tape;
  const Tensor y = ops::relu(x);
  expect_parts(message_of([&] { tape.backward(y); }), {"backward", "f64[2]", "one element"});
  expect_parts(message_of([&] { tape.backward(Tensor()); }), {"backward", "undefined"});
  expect_parts(message_of([&] { tape.backward(Tensor::zeros({1}, DType::f64, kCpu)); }),
               {"not a result of this tape"});
  expect_parts(message_of([&] { tape.backward(std::vector{y}, std::vector<Tensor>{}); }),
               {"1 results and 0"});
  expect_parts(
      message_of([&] { tape.backward(std::vector{y}, std::vector{Tensor::zeros({3}, DType::f64, kCpu)}); }),
      {"f64[3]", "f64[2]"});
  tape.backward(ops::sum(y));  // none of these spent the tape
  EXPECT_EQ(values(grad(x)), (std::vector<double>{1, 1}));
}

TEST(Tape, DestroyedWithoutBackwardFreesEverything) {
  const Tensor x = leaf(std::vector<double>(1000, 0.5));
  const size_t before = kCpu.allocator().stats().allocated;
  {
    Tape tape;
    Tensor y = x;
    for (int i = 0; i < 20; ++i) y = ops::silu(ops::mul(y, x));
    EXPECT_GT(kCpu.allocator().stats().allocated, before + 20 * 8000);
  }
  EXPECT_EQ(kCpu.allocator().stats().allocated, before);
  EXPECT_EQ(x.grad_state()->pending, 0);
}

TEST(Tape, FreesWhatItSavedInReverseWhileItRuns) {
  const Tensor x = leaf(std::vector<double>(100'000, 0.5));
  {
    Tape tape;  // the leaf's gradient is made here, so that it does not count below
    tape.backward(ops::sum(x.rank() == 1 ? ops::scale(x, 1) : x));
  }
  const size_t before = kCpu.allocator().stats().allocated;
  Tape tape;
  Tensor y = x;
  for (int i = 0; i < 10; ++i) y = ops::silu(y);
  Tensor loss = ops::sum(y);
  y = Tensor();
  std::vector<size_t> held;
  tape.on_entry([&](const char*, size_t) { held.push_back(kCpu.allocator().stats().allocated); });
  tape.backward(loss);
  loss = Tensor();
  for (size_t i = 2; i + 1 < held.size(); ++i) EXPECT_LT(held[i], held[i - 1]) << i;
  EXPECT_EQ(kCpu.allocator().stats().allocated, before);
}

TEST(Tape, AnErrorInBackwardLeavesNothingBehind) {
  const Tensor x = leaf(std::vector<double>(1000, 0.5));
  {
    Tape tape;
    tape.backward(ops::sum(ops::scale(x, 1)));
  }
  const size_t before = kCpu.allocator().stats().allocated;
  {
    Tape tape;
    const Tensor h = ops::silu(x), y = ops::silu(h), z = ops::silu(y);
    h.detach().fill(0);
    expect_parts(message_of([&] { tape.backward(ops::sum(z)); }), {"backward of silu", "written in place"});
  }
  EXPECT_EQ(kCpu.allocator().stats().allocated, before);
  EXPECT_EQ(x.grad_state()->pending, 0);
  EXPECT_EQ(values(grad(x)), std::vector<double>(1000, 1.0)) << "of the pass before";
  zero_grad(x);
  Tape tape;
  tape.backward(ops::sum(ops::scale(x, 2)));
  EXPECT_EQ(values(grad(x)), std::vector<double>(1000, 2.0));
}

// ---- passes that throw ----

/// A loss whose backward pass throws once the gradients of `early` have arrived.
Tensor failing(const Tensor& early, const Tensor& late) {
  const Tensor saved = ops::scale(late, 1), bad = ops::silu(saved);
  const Tensor loss = ops::add(ops::sum(bad), ops::sum(early));
  saved.detach().fill(0);
  return loss;
}

TEST(FailedPass, RestoresGradientsThatWereEmpty) {
  for (const bool buffer : {false, true}) {
    const Tensor x = leaf({1, 2}), w = leaf({7.6, 7.6});
    if (buffer) set_grad_buffer(w, Tensor::full({2}, 99, DType::f64, kCpu));
    const size_t before = kCpu.allocator().stats().allocated;
    {
      Tape tape;
      const Tensor loss = failing(ops::mul(w, w), x);
      expect_parts(message_of([&] { tape.backward(loss); }), {"written in place"});
    }
    EXPECT_FALSE(grad(w).defined());
    EXPECT_FALSE(grad(x).defined());
    EXPECT_EQ(kCpu.allocator().stats().allocated, before);
    Tape tape;
    tape.backward(ops::sum(ops::mul(w, w)));
    EXPECT_EQ(values(grad(w)), (std::vector<double>{15.2, 15.2}));
  }
}

TEST(FailedPass, RestoresGradientsThatItAddedTo) {
  const Tensor x = leaf({1, 2}), w = leaf({3, 4});
  {
    Tape tape;
    tape.backward(ops::sum(ops::mul(w, w)));
  }
  const void* const address = grad(w).raw();
  const size_t before = kCpu.allocator().stats().allocated;
  {
    Tape tape;
    // Added as a whole, in place, and to a slice.
    const Tensor loss = failing(
        ops::add(ops::add(ops::mul(w, w), ops::relu(w)), ops::expand(ops::silu(ops::slice(w, 0, 1, 2)), {2})),
        x);
    expect_parts(message_of([&] { tape.backward(loss); }), {"written in place"});
  }
  EXPECT_EQ(values(grad(w)), (std::vector<double>{6, 8}));
  EXPECT_EQ(grad(w).raw(), address);
  EXPECT_FALSE(grad(x).defined());
  EXPECT_EQ(kCpu.allocator().stats().allocated, before);
  Tape tape;
  tape.backward(ops::sum(w.rank() == 1 ? ops::scale(w, 2) : w));
  EXPECT_EQ(values(grad(w)), (std::vector<double>{8, 10}));
}

TEST(FailedPass, RestoresWhatCheckpointsInsideItDid) {
  const Tensor x = leaf({1, 2}), w = leaf({3, 4});
  for (const bool adds : {false, true}) {
    if (adds) {
      Tape tape;
      tape.backward(ops::sum(ops::scale(w, 5)));
    }
    Tape tape;
    const Tensor early = checkpoint([&](const Tensor& y) { return ops::mul(y, w); }, w);
    const Tensor loss = failing(early, x);
    EXPECT_NE(message_of([&] { tape.backward(loss); }), "");
    EXPECT_EQ(grad(w).defined(), adds);
    if (adds) EXPECT_EQ(values(grad(w)), (std::vector<double>{5, 5}));
    EXPECT_FALSE(w.grad_state()->logged);
  }
}

TEST(FailedPass, TellsThoseWhoTookGradientsBeforeItWasOver) {
  const Tensor x = leaf({1, 2}), w = leaf({3, 4});
  int undone = 0, first = 0;
  on_grad(w, [&](const Tensor&) {
    for (int i = 0; i < 2; ++i)
      first += if_pass_throws(&undone, [&] {
        undone += 1;
        EXPECT_TRUE(grad(w).defined()) << "not restored yet";
        check(false, "dropped");
      });
  });
  for (const bool fails : {true, false, true}) {
    undone = first = 0;
    zero_grad(w), zero_grad(x);
    Tape tape;
    const Tensor h = ops::scale(x, 1), last = ops::silu(h), first_to_run = ops::mul(w, w);
    if (fails) h.detach().fill(0);
    const Tensor loss = ops::add(ops::sum(last), ops::sum(first_to_run));
    const std::string said = message_of([&] { tape.backward(loss); });
    EXPECT_EQ(said.find("written in place") != std::string::npos, fails) << said;
    EXPECT_EQ(undone, fails);
    EXPECT_EQ(first, 1);
    EXPECT_EQ(grad(w).defined(), !fails);
  }
  expect_parts(message_of([&] { if_pass_throws(&undone, [] {}); }), {"no backward pass"});
}

TEST(FailedPass, CostsNoCopyUnlessItAdds) {
  const Tensor w = leaf(std::vector<double>(1000, 0.5));
  uint64_t requests[3] = {};
  for (int pass = 0; pass < 3; ++pass) {
    if (pass == 1) zero_grad(w);
    const uint64_t before = kCpu.allocator().stats().requests;
    Tape tape;
    tape.backward(ops::sum(ops::relu(w)));
    requests[pass] = kCpu.allocator().stats().requests - before;
  }
  EXPECT_EQ(requests[2], requests[1] + 1);
}

// As requires_grad_() of PyTorch: a tied weight that was made a parameter once more had a gradient of its
// own, so that an optimizer of its copies saw none.
TEST(Leaf, ThatRequiresAGradientAlreadyStaysTied) {
  const Tensor embedding = leaf({1, 2});
  Tensor head = embedding;
  require_grad(head);
  {
    Tape tape;
    tape.backward(ops::sum(ops::scale(head, 3)));
  }
  require_grad(head);
  EXPECT_EQ(head.grad_state(), embedding.grad_state());
  EXPECT_EQ(values(grad(embedding)), (std::vector<double>{3, 3}));
  Tensor wider = Tensor::zeros({2}, DType::bf16, kCpu);
  require_grad(wider);
  require_grad(wider, DType::f32);
  EXPECT_EQ(wider.grad_state()->grad_dtype, DType::f32);
}

TEST(Leaf, ThatIsTwoInputsOfAnEntryHasNoTargetBeforeItsGradientArrives) {
  const Tensor x = leaf({1, 2}), other = leaf({3, 4}), buffer = Tensor::full({2}, 9, DType::f64, kCpu);
  set_grad_buffer(x, buffer);
  for (const Tensor& second : {x, other}) {
    zero_grad(x);
    Tape tape;
    Tensor y = x.detach().clone();
    tape.record("both", {&x, &second}, {&y}, [&](Backward& b) {
      EXPECT_EQ(b.target(0).grad.defined(), second.grad_state() == other.grad_state());
      b.accumulate(1, b.grad());
      const GradTarget target = b.target(0);
      EXPECT_TRUE(target.grad.shares_storage(buffer));
      EXPECT_EQ(target.accumulate, second.grad_state() == x.grad_state());
      if (!target.accumulate) target.grad.fill(0);
      accumulate(target.grad, b.grad());
      b.written(0, target);
    });
    tape.backward(std::vector{y}, std::vector{Tensor::full({2}, 1, DType::f64, kCpu)});
    EXPECT_EQ(values(grad(x)), std::vector<double>(2, second.grad_state() == x.grad_state() ? 2 : 1));
  }
}

}  // namespace
}  // namespace tessera
