#include "ops/shape/shape.h"

#include <gtest/gtest.h>

#include "autograd/gradcheck.h"
#include "ops/activation/activation.h"
#include "ops/linear/linear.h"
#include "ops/op.h"
#include "ops/pointwise/pointwise.h"
#include "tensor/kernels.h"
#include "tests/errors.h"
#include "tests/ops/expect.h"
#include "tests/ops/tensors.h"

namespace tessera::ops {
namespace {

TEST(Concat, JoinsInOrderByHand) {
  const Tensor y = concat({counting({2, 1}), counting({2, 2}, 10)}, -1);
  EXPECT_EQ(values(y), (std::vector<double>{0, 10, 11, 1, 12, 13}));
}

TEST(Concat, MovesIntegersAndFlags) {
  const Tensor a = Tensor::from(std::vector<int64_t>{int64_t{1} << 62, -3}, {2});
  const Tensor b = Tensor::from(std::vector<int64_t>{7}, {1});
  EXPECT_EQ(concat({a, b}, 0).to_vector<int64_t>(), (std::vector<int64_t>{int64_t{1} << 62, -3, 7}));
  EXPECT_EQ(concat({Tensor::full({1}, 1, DType::boolean, kCpu), Tensor::zeros({1}, DType::boolean, kCpu)}, 0)
                .to_vector<bool>(),
            (std::vector<bool>{true, false}));
}

TEST(Concat, TheSamePartTwiceGetsBothGradients) {
  Tensor x = counting({2});
  require_grad(x);
  Tape tape;
  const Tensor y = concat({x, x}, 0);
  tape.backward(std::vector{y}, std::vector{counting({4}, 1)});
  EXPECT_EQ(values(grad(x)), (std::vector<double>{1 + 3, 2 + 4}));
}

TEST(Concat, PartsWithoutGradientGetNone) {
  Tensor x = counting({2});
  const Tensor other = counting({3});
  require_grad(x);
  Tape tape;
  const Tensor y = concat({other, x}, 0);
  tape.backward(std::vector{y}, std::vector{counting({5}, 1)});
  EXPECT_EQ(values(grad(x)), (std::vector<double>{4, 5}));
}

TEST(Concat, ErrorsNameThePart) {
  expect_parts(message_of([] { concat({}, 0); }), {"concat", "no parts"});
  expect_parts(message_of([] {
                 concat({counting({2, 3}), counting({2, 4})}, 0);
               }),
               {"concat", "part 1", "f64[2, 4]", "f64[2, 3]"});
  expect_parts(message_of([] {
                 concat({counting({2}), counting({2}).to(DType::f32)}, 0);
               }),
               {"part 1", "f32[2]"});
  expect_parts(message_of([] { concat({counting({2}), Tensor()}, 0); }), {"part 1", "undefined"});
  expect_parts(message_of([] { concat({counting({2})}, 1); }), {"dimension 1"});
}

TEST(Slice, IsAViewAndGradientsAddUpWhereSlicesOverlap) {
  Tensor x = counting({5});
  require_grad(x);
  Tape tape;
  const Tensor a = slice(x, 0, 0, 3), b = slice(x, 0, 1, 5, 2);
  EXPECT_TRUE(a.shares_storage(x));
  EXPECT_EQ(values(b), (std::vector<double>{1, 3}));
  tape.backward(std::vector{a, b}, std::vector{counting({3}, 1), counting({2}, 10)});
  EXPECT_EQ(values(grad(x)), (std::vector<double>{1, 2 + 10, 3, 11, 0}));
}

TEST(Slice, ClearsAStaleGradientOutsideTheSlice) {
  Tensor x = counting({3});
  require_grad(x);
  for (int step = 0; step < 2; ++step) {
    Tape tape;
    const Tensor y = slice(x, 0, step, step + 1);
    tape.backward(y);
    if (step == 0) zero_grad(x);
  }
  EXPECT_EQ(values(grad(x)), (std::vector<double>{0, 1, 0}));
}

TEST(Split, AGradientWrittenInPlaceIsThatOfTheWhole) {
  Tensor x = counting({4, 6}, 1);
  require_grad(x);
  Tape tape;
  const Tensor h = relu(x);
  const std::vector<Tensor> parts = split(h, 1, {2, 3, 1});
  EXPECT_TRUE(parts[1].shares_storage(h));
  EXPECT_EQ(parts[2].shape(), (Shape{4, 1}));
  retain_grad(h);
  const Tensor weight = Tensor::full({5, 2}, 1, DType::f64, Device::cpu());
  const Tensor product = linear(parts[0], weight);  // writes its gradient in place
  const Tensor squares = mul(parts[1], parts[1]),
               more = scale(parts[1], 2);  // bring theirs; parts[2] is not read
  tape.backward(std::vector{product, squares, more},
                std::vector{Tensor::full({4, 5}, 1, DType::f64, Device::cpu()),
                            Tensor::full({4, 3}, 1, DType::f64, Device::cpu()),
                            Tensor::full({4, 3}, 1, DType::f64, Device::cpu())});
  EXPECT_EQ(values(grad(x).slice(0, 0, 1)), (std::vector<double>{5, 5, 8, 10, 12, 0}));
}

TEST(Split, OneTensorReadTwiceInPlaceGetsBothGradients) {
  Tensor x = counting({2, 4}, 1);
  require_grad(x);
  Tape tape;
  const std::vector<Tensor> parts = split(x, 1, {2, 2});
  const Tensor weight = Tensor::full({3, 2}, 1, DType::f64, Device::cpu()),
               ones = Tensor::full({2, 3}, 1, DType::f64, Device::cpu());
  const Tensor a = linear(parts[1], weight), b = linear(parts[1], weight);
  tape.backward(std::vector{a, b}, std::vector{ones, ones});
  EXPECT_EQ(values(grad(x)), (std::vector<double>{0, 0, 6, 6, 0, 0, 6, 6}));
}

TEST(Split, NamesSizesThatDoNotFit) {
  expect_parts(message_of([] {
                 split(counting({2, 5}), 1, {2, 4});
               }),
               {"split", "part 1 of size 4", "dimension 1", "f64[2, 5]"});
  expect_parts(message_of([] { split(counting({2, 5}), 1, {2, 2}); }), {"split", "add up to 4", "f64[2, 5]"});
  expect_parts(message_of([] { split(counting({2, 5}), 1, {-1, 6}); }), {"split", "part 0 of size -1"});
  expect_parts(message_of([] { split(counting({2, 5}), 2, {1}); }), {"dimension 2"});
}

TEST(Slice, AddsToAGradientThatOthersRead) {
  // y's gradient reaches h through a view, then a slice adds to a part of h's: the view's memory stays whole.
  Tensor x = counting({4}, 1);
  require_grad(x);
  Tape tape;
  const Tensor h = relu(x), part = slice(h, 0, 0, 2), whole = transpose(reshape(h, {2, 2}), 0, 1);
  const Tensor given = counting({2, 2}, 1);
  tape.backward(std::vector{part, whole}, std::vector{counting({2}, 100), given});
  EXPECT_EQ(values(grad(x)), (std::vector<double>{101, 104, 2, 4}));
  EXPECT_EQ(values(given), (std::vector<double>{1, 2, 3, 4}));
}

TEST(Slice, AWriteThroughAViewIsAWriteToItsInput) {
  Tensor x = counting({4});
  require_grad(x);
  Tape tape;
  const Tensor y = silu(x), view = slice(x, 0, 0, 1);
  view.detach().fill(3);
  expect_parts(message_of([&] { tape.backward(std::vector{y}, std::vector{counting({4})}); }),
               {"backward of silu", "written in place"});
}

TEST(Slice, HoldsNothingForBackward) {
  const size_t before = kCpu.allocator().stats().allocated;
  Tensor leaf = counting({1});
  require_grad(leaf);
  const size_t with_leaf = kCpu.allocator().stats().allocated;
  {
    Tape tape;
    Tensor y;
    {
      const Tensor wide = relu(expand(leaf, {1 << 20}));
      y = concat({slice(wide, 0, 0, 1)}, 0);
    }
    // relu keeps the expanded view of one element; the slice keeps no megabytes.
    EXPECT_LT(kCpu.allocator().stats().allocated - with_leaf, size_t(1) << 20);
    tape.backward(y);
  }
  EXPECT_EQ(values(grad(leaf)), (std::vector<double>{0}));
  leaf = Tensor();
  EXPECT_EQ(kCpu.allocator().stats().allocated, before);
}

TEST(Slice, Errors) {
  const Tensor x = counting({4, 3});
  expect_parts(message_of([&] { slice(x, 0, 2, 5); }), {"slice", "[2, 5)", "[4, 3]"});
  expect_parts(message_of([&] { slice(x, 0, 3, 2); }), {"slice", "[3, 2)"});
  expect_parts(message_of([&] { slice(x, 0, 0, 2, 0); }), {"slice", "step 0"});
  expect_parts(message_of([&] { slice(x, 2, 0, 1); }), {"dimension 2"});
  expect_parts(message_of([&] { slice(Tensor(), 0, 0, 1); }), {"slice", "undefined"});
}

/// y = 3 x, whose backward adds to x's gradient in place wherever it may.
Tensor tripled(const Tensor& x, bool& in_place) {
  Tensor y = scale(x.detach(), 3);
  Tape::recording(x)->record("tripled", {&x}, {&y}, [&in_place](Backward& b) {
    GradTarget target = b.target(0);
    in_place = target.grad.defined() && target.accumulate;
    const Tensor dx = scale(b.grad(), 3);
    if (!in_place) return b.accumulate(0, dx);
    accumulate(target.grad, dx);
    b.written(0, target);
  });
  return y;
}

TEST(Slice, TakesWhatIsAddedInPlaceWhereItsInputHasAGradient) {
  for (const bool first : {false, true}) {  // whether the input's gradient arrives before the slice's
    Tensor x = counting({4}, 1);
    require_grad(x);
    Tape tape;
    bool in_place = false;
    const Tensor h = relu(x);
    Tensor other = first ? Tensor() : relu(h);
    const Tensor part = slice(h, 0, 1, 3), y = tripled(part, in_place);
    if (first) other = relu(h);
    const Tensor given = counting({4}, 10);
    tape.backward(std::vector{y, other}, std::vector{counting({2}, 1), given});
    EXPECT_EQ(in_place, first);
    EXPECT_EQ(values(grad(x)), (std::vector<double>{10, 11 + 3, 12 + 6, 13}));
    EXPECT_EQ(values(given), (std::vector<double>{10, 11, 12, 13}));
  }
}

TEST(Slice, KeepsAGradientThatIsWantedForItself) {
  Tensor x = counting({3}, 1);
  require_grad(x);
  Tape tape;
  bool in_place = false;
  const Tensor h = relu(x), part = slice(h, 0, 0, 2), y = tripled(part, in_place), other = relu(h);
  retain_grad(part);
  tape.backward(std::vector{y, other}, std::vector{counting({2}, 1), counting({3})});
  EXPECT_FALSE(in_place);
  EXPECT_EQ(values(grad(part)), (std::vector<double>{3, 6}));
  EXPECT_EQ(values(grad(x)), (std::vector<double>{0 + 3, 1 + 6, 2}));
}

TEST(Slice, TellsALeafThatItsGradientArrivedThroughAPart) {
  Tensor x = counting({3}, 1);
  require_grad(x);
  int called = 0;
  on_grad(x, [&](const Tensor& dx) {
    called += 1;
    EXPECT_EQ(values(dx), (std::vector<double>{0 + 3, 1 + 6, 2}));
  });
  Tape tape;
  bool in_place = false;
  const Tensor y = tripled(slice(x, 0, 0, 2), in_place), other = relu(x);
  tape.backward(std::vector{y, other}, std::vector{counting({2}, 1), counting({3})});
  EXPECT_TRUE(in_place);
  EXPECT_EQ(called, 1);
}

TEST(Split, TheWholeGradientLiesInMemoryAsTheWholeDoes) {
  Tensor x = counting({3, 2, 4}, 1);
  require_grad(x);
  Tape tape;
  const Tensor h = relu(x), turned = transpose(h, 0, 1);
  retain_grad(h);
  const std::vector<Tensor> parts = split(turned, 2, {1, 3});
  const Tensor weight = Tensor::full({1, 3}, 1, DType::f64, Device::cpu());
  const Tensor product = linear(parts[1], weight);
  tape.backward(std::vector{product}, std::vector{counting({2, 3, 1}, 1)});
  EXPECT_TRUE(grad(h).has_rows());
  EXPECT_EQ(values(grad(x)),
            (std::vector<double>{0, 1, 1, 1, 0, 4, 4, 4, 0, 2, 2, 2, 0, 5, 5, 5, 0, 3, 3, 3, 0, 6, 6, 6}));
}

TEST(Transpose, IsAView) {
  const Tensor x = counting({2, 3});
  const Tensor y = transpose(x, 0, 1);
  EXPECT_TRUE(y.shares_storage(x));
  EXPECT_EQ(values(y), (std::vector<double>{0, 3, 1, 4, 2, 5}));
}

TEST(Reshape, IsAViewWhereTheStridesAllowItAndACopyElsewhere) {
  const Tensor x = counting({4, 6});
  EXPECT_TRUE(reshape(x, {2, 2, 6}).shares_storage(x));
  const Tensor turned = reshape(x.transpose(0, 1), {24});
  EXPECT_FALSE(turned.shares_storage(x));
  EXPECT_EQ(values(turned)[1], 6);
  // A pitched row (5 doubles of 6) does not join its neighbour: a copy, and the copy is right.
  const Tensor pitched = counting({4, 5});
  const Tensor flat = reshape(pitched, {20});
  EXPECT_FALSE(flat.shares_storage(pitched));
  EXPECT_EQ(values(flat), values(pitched));
  // Neither side's pitch divides the other's rows.
  const Tensor other = reshape(counting({3, 5}), {5, 3});
  EXPECT_EQ(values(other), values(counting({15})));
  expect_parts(message_of([&] { reshape(x, {5, 5}); }), {"reshape", "f64[4, 6]", "[5, 5]"});
}

TEST(Expand, SumsOverWhatWasExpandedByHand) {
  Tensor x = counting({2, 1}, 5);
  require_grad(x);
  Tape tape;
  const Tensor y = expand(x, {3, 2, 2});
  EXPECT_EQ(values(y), (std::vector<double>{5, 5, 6, 6, 5, 5, 6, 6, 5, 5, 6, 6}));
  tape.backward(std::vector{y}, std::vector{counting({3, 2, 2})});
  EXPECT_EQ(values(grad(x)), (std::vector<double>{0 + 1 + 4 + 5 + 8 + 9, 2 + 3 + 6 + 7 + 10 + 11}));
  expect_parts(message_of([&] { expand(x.detach(), {3, 3, 1}); }), {"expand", "[2, 1]", "[3, 3, 1]"});
}

TEST(Expand, ChainsWithItselfAndASecondUse) {
  // The gradient of `wide` arrives as an expanded view first and is then added to.
  const auto f = [](const std::vector<Tensor>& in) {
    const Tensor wide = expand(in[0], {3, 4});
    return std::vector{expand(wide, {2, 3, 4}), silu(wide), slice(wide, 1, 1, 3)};
  };
  const auto result = gradcheck(f, {counting({3, 1}, 0.5)});
  EXPECT_TRUE(result.ok) << result.message;
}

TEST(Permute, IsThePermutedViewAndSoIsItsGradient) {
  Tensor x = counting({2, 3, 4});
  for (const std::vector<int>& order : {std::vector<int>{2, 0, 1}, {1, 2, 0}, {0, 2, 1}, {-1, -2, -3}}) {
    const Tensor y = permute(x, order), dy = counting(y.shape(), 5);
    EXPECT_EQ(values(y), values(x.permute(order)));
    EXPECT_TRUE(y.shares_storage(x));
    const Tensor gradient =
        gradient_of(counting({2, 3, 4}), dy, [&](const Tensor& v) { return permute(v, order); });
    EXPECT_EQ(values(gradient.permute(order)), values(dy));
  }
  expect_parts(message_of([&] { permute(x, {0, 1}); }), {"permute", "2 dimensions", "[2, 3, 4]"});
  expect_parts(message_of([&] { permute(x, {0, 1, 1}); }), {"permute", "named twice"});
  expect_parts(message_of([&] { permute(Tensor(), {0}); }), {"permute", "undefined"});
}

TEST(Select, TakesOneElementOfADimension) {
  const Tensor x = counting({2, 3});
  EXPECT_EQ(values(select(x, 0, 1)), (std::vector<double>{3, 4, 5}));
  EXPECT_EQ(values(select(x, 1, -1)), (std::vector<double>{2, 5}));
  EXPECT_EQ(select(select(x, 1, 0), 0, 1).item(), 3);
  EXPECT_EQ(values(gradient_of(counting({2, 3}), counting({2}, 7),
                               [](const Tensor& v) { return select(v, -1, 1); })),
            (std::vector<double>{0, 7, 0, 0, 8, 0}));
  expect_parts(message_of([&] { select(x, 0, 2); }),
               {"select", "index 2", "dimension 0 of f64[2, 3] on cpu"});
  expect_parts(message_of([&] { select(x, 2, 0); }), {"select", "dimension 2"});
}

TEST(Stack, IsAConcatAlongANewDimension) {
  const Tensor a = counting({2}, 1), b = counting({2}, 5);
  EXPECT_EQ(values(stack({a, b})), (std::vector<double>{1, 2, 5, 6}));
  EXPECT_EQ(values(stack({a, b}, -1)), (std::vector<double>{1, 5, 2, 6}));
  EXPECT_EQ(stack({a, b, a}, 1).shape(), (Shape{2, 3}));
  expect_parts(message_of([&] { stack({a, counting({3})}); }), {"stack", "part 1", "f64[3]", "f64[2]"});
  expect_parts(message_of([&] { stack({a}, 2); }), {"unsqueeze", "dimension 2"});
  expect_parts(message_of([&] { stack({}); }), {"stack", "no parts"});
}

TEST(Squeeze, AddsAndRemovesDimensionsOfSize1) {
  const Tensor x = counting({2, 1, 3});
  EXPECT_EQ(squeeze(x, 1).shape(), (Shape{2, 3}));
  EXPECT_EQ(unsqueeze(x, 0).shape(), (Shape{1, 2, 1, 3}));
  EXPECT_EQ(unsqueeze(x, -1).shape(), (Shape{2, 1, 3, 1}));
  EXPECT_EQ(unsqueeze(x, 3).shape(), (Shape{2, 1, 3, 1}));
  EXPECT_TRUE(squeeze(x, -2).shares_storage(x));
  expect_parts(message_of([&] { squeeze(x, 0); }), {"squeeze", "dimension 0 of f64[2, 1, 3]", "size 1"});
  expect_parts(message_of([&] { unsqueeze(x, 4); }), {"unsqueeze", "dimension 4"});
}

TEST(Reshape, CompletesTheOneSizeThatIsMinus1) {
  const Tensor x = counting({2, 3, 4});
  EXPECT_EQ(reshape(x, {-1}).shape(), Shape{24});
  EXPECT_EQ(reshape(x, {4, -1}).shape(), (Shape{4, 6}));
  EXPECT_EQ(reshape(x, {6, 4}).shape(), (Shape{6, 4}));
  EXPECT_EQ(values(gradient_of(counting({2, 3}), counting({3, 2}),
                               [](const Tensor& v) {
                                 return reshape(v, {3, -1});
                               })),
            values(counting({2, 3})));
  expect_parts(message_of([&] { reshape(x, {-1, -1}); }), {"reshape", "more than one size is -1"});
  expect_parts(message_of([&] { reshape(x, {5, -1}); }), {"reshape", "24 elements", "5"});
  expect_parts(message_of([&] { reshape(x, {0, -1}); }), {"reshape", "24 elements"});
  expect_parts(message_of([&] { reshape(x, {-2, 3}); }), {"-2"});
  expect_parts(message_of([&] { reshape(Tensor(), {-1}); }), {"reshape", "undefined"});
}

TEST(ShapeWords, AreReadAndRefused) {
  const OpSpec& op = find_op("reshape");
  const auto run = [&](const char* word) {
    return op.run({counting({2, 3})}, complete(op, {{"shape", std::string(word)}}))[0].shape();
  };
  EXPECT_EQ(run("3,-1"), (Shape{3, 2}));
  EXPECT_EQ(run("-1"), (Shape{6}));
  for (const char* word : {"3,", ",3", "3;2", "3,x", "-2,3", "-1,-1", "4,-1", "0,-1", "9999999999999999999",
                           "3,,2", " 6", "4294967296,4294967296,-1"})
    EXPECT_NE(message_of([&] { run(word); }), "") << word;
  const OpSpec& expand_op = find_op("expand");
  expect_parts(message_of([&] {
                 expand_op.run({counting({3})}, complete(expand_op, {{"shape", std::string("-1,3")}}));
               }),
               {"expand", "-1,3"});
}

}  // namespace
}  // namespace tessera::ops
