#include "nn/sparse24.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "autograd/checkpoint.h"
#include "nn/hidden_l1.h"
#include "nn/observe.h"
#include "ops/mlp/mlp.h"
#include "ops/pointwise/pointwise.h"
#include "ops/reduce/reduce.h"
#include "tests/errors.h"
#include "tests/nn/random.h"

namespace tessera::nn {
namespace {

Mlp squared(Rng& rng, bool gated = false, ops::Activation kind = ops::Activation::relu_squared) {
  return Mlp(12, 40, rng, kCpu, {.activation = kind, .gated = gated, .bias = false, .dtype = DType::f64});
}

/// y of a recorded call.
Tensor recorded(const Mlp& mlp, const Tensor& x) {
  Tape tape;
  return mlp(x).detach();
}

TEST(Sparse24Form, HoldsWhileATapeRecords) {
  Rng rng(1);
  Mlp mlp = squared(rng);
  const Tensor x = random({16, 12}, 2);
  const std::vector<double> dense = values(mlp(x));
  set_sparse24(mlp, {});
  EXPECT_STREQ(name_of(mlp.up.form), "sparse24");
  EXPECT_EQ(values(mlp(x)), dense);  // no tape
  const ops::MlpSparse24Result expected = ops::mlp_sparse24(x, mlp.up.weight, mlp.down.weight, {});
  EXPECT_EQ(values(recorded(mlp, x)), values(expected.y));
  EXPECT_NE(values(expected.y), dense);
  {
    const Observe observed(mlp, {.forward = [](const LinearCall&) {}});
    EXPECT_EQ(values(recorded(mlp, x)), dense);  // layer by layer
  }
  sparse24_of(mlp)->active = false;
  const std::vector<double> inactive = values(recorded(mlp, x));
  for (size_t i = 0; i < dense.size(); ++i) EXPECT_NEAR(inactive[i], dense[i], 1e-12);
}

TEST(Sparse24Form, KeepsTheCountsOfTheLastRecordedCall) {
  Rng rng(1);
  Mlp mlp = squared(rng);
  set_sparse24(mlp, {.how = {.dense_share = 0.1}});
  const Tensor x = random({16, 12}, 2), other = random({16, 12}, 3);
  const Sparse24& form = *sparse24_of(mlp);
  EXPECT_EQ(values(form.counts), std::vector<double>(40, 0));
  mlp(x);
  EXPECT_EQ(values(form.counts), std::vector<double>(40, 0));  // no tape
  recorded(mlp, x);
  const Tensor counts = ops::mlp_sparse24(x, mlp.up.weight, mlp.down.weight, {.dense_share = 0.1}).counts;
  EXPECT_EQ(values(form.counts), values(counts));
  // The next call takes the densest columns by them.
  EXPECT_EQ(values(recorded(mlp, other)), values(ops::mlp_sparse24(other, mlp.up.weight, mlp.down.weight,
                                                                   {.dense_share = 0.1, .previous = counts})
                                                     .y));
}

/// Losses and gradients of some steps, and the form's state after each.
std::vector<std::vector<double>> train_24(const ops::MlpSparse24& how, bool recompute) {
  Rng rng(1), choices(2);
  Mlp mlp = squared(rng);
  Sparse24 form{.how = how};
  form.how.rng = &choices;
  form.dynamic.interval = 3;
  set_sparse24(mlp, form);
  std::vector<std::vector<double>> seen;
  for (uint64_t step = 0; step < 4; ++step) {
    zero_grad(mlp);
    Tape tape;
    const auto twice = [&](const Tensor& x) { return mlp(mlp(x)); };
    const Tensor x = random({16, 12}, 2 + step), y = recompute ? checkpoint(twice, x) : twice(x);
    const Tensor loss = ops::sum(ops::mul(y, y));
    tape.backward(loss);
    seen.push_back({loss.item<double>()});
    for (const Tensor& weight : {mlp.up.weight, mlp.down.weight}) seen.push_back(values(grad(weight)));
    const Sparse24& now = *sparse24_of(mlp);
    seen.push_back(values(now.counts));
    seen.push_back({double(now.dynamic.step), values(now.dynamic.scale)[0]});
  }
  return seen;
}

TEST(Sparse24Form, IsRecomputedWithTheColumnsAndTheScaleOfTheFirstRun) {
  using ops::Method24;
  const ops::MlpSparse24 split{.dense_share = 0.2};
  ops::MlpSparse24 dynamic = split, drawn = split;
  dynamic.method = Method24::soft_dynamic;
  drawn.method = Method24::mvue;
  for (const ops::MlpSparse24& how : {split, dynamic, drawn}) {
    SCOPED_TRACE(name_of(how.method));
    const auto plain = train_24(how, false), again = train_24(how, true);
    EXPECT_EQ(again, plain);
    EXPECT_EQ(plain.back()[0], how.method == Method24::soft_dynamic ? 8 : 0) << "two calls a step";
  }
}

TEST(Sparse24Form, KeepsNoCountsThatNoGemmReads) {
  Rng rng(1);
  Mlp mlp = squared(rng);
  constexpr ops::Gemm24 kSparse = ops::Gemm24::sparse;
  set_sparse24(mlp, {.how = {.y = kSparse, .dx = kSparse, .dup = kSparse, .ddown = kSparse}});
  recorded(mlp, random({16, 12}, 2));
  EXPECT_EQ(values(sparse24_of(mlp)->counts), std::vector<double>(40, 0));
}

TEST(HiddenL1, DoesNotWorkAroundACheckpointButInsideOne) {
  Rng rng(1);
  const Mlp mlp = squared(rng);
  const Tensor x = random({16, 12}, 2);
  Tape tape;
  {
    const HiddenL1 hidden;
    expect_error([&] { checkpoint([&](const Tensor& t) { return mlp(t); }, x); },
                 {"nn::HiddenL1 does not work inside checkpoint()", "return its sum() as an output"});
  }
  const auto with_penalty = [&](const std::vector<Tensor>& in) {
    const HiddenL1 hidden;
    const Tensor y = mlp(in[0]);
    return std::vector{y, hidden.sum()};
  };
  const std::vector<Tensor> both = checkpoint(with_penalty, {x});
  tape.backward(both[1]);
  const std::vector<double> again = values(grad(mlp.up.weight));
  zero_grad(mlp);
  Tape plain;
  plain.backward(with_penalty({x})[1]);
  EXPECT_EQ(again, values(grad(mlp.up.weight)));
}

TEST(Sparse24Form, IsStateOfTheModel) {
  Rng rng(1);
  Mlp mlp = squared(rng);
  set_sparse24(mlp, {});
  std::vector<std::string> names;
  for_each_field(mlp, [&](const std::string& name, auto&) { names.push_back(name); });
  const auto has = [&](const char* name) { return std::ranges::find(names, name) != names.end(); };
  EXPECT_TRUE(has("up.form.counts"));
  EXPECT_TRUE(has("up.form.how.method"));
  EXPECT_TRUE(has("up.form.scale"));
  EXPECT_EQ(parameters(mlp).size(), 2u);  // none of it is trained
}

TEST(Sparse24Form, AChangedScheduleOrSettingIsAnotherGraph) {
  const Sparse24 one{.how = {.dense_share = 0.1}};
  Sparse24 other = one;
  EXPECT_EQ(Form(one), Form(other));
  other.active = false;
  EXPECT_NE(Form(one), Form(other));
  other = one, other.how.dx = ops::Gemm24::dense;
  EXPECT_NE(Form(one), Form(other));
  other = one, other.order = "stride";
  EXPECT_NE(Form(one), Form(other));
}

TEST(HiddenL1, SumsTheMeansOfTheNetworksThatATapeRecords) {
  Rng rng(1);
  Mlp one = squared(rng), other = squared(rng);
  set_sparse24(other, {.how = {.dense_share = 0.1}});
  const Tensor x = random({16, 12}, 2);
  const auto mean_of = [&](const Mlp& mlp, const ops::MlpSparse24& how) {
    ops::MlpSparse24 with = how;
    with.l1 = true;
    return values(ops::mlp_sparse24(x, mlp.up.weight, mlp.down.weight, with).l1)[0];
  };
  const double expected = mean_of(one, dense_call(one.activation)) + mean_of(other, {.dense_share = 0.1});
  const std::vector<double> plain = values(recorded(one, x));
  {
    const HiddenL1 hidden;
    one(x);
    EXPECT_FALSE(hidden.sum().defined());  // no tape
    Tape tape;
    {
      const HiddenL1 inner;
      one(x);
      EXPECT_TRUE(inner.sum().defined());
    }
    EXPECT_FALSE(hidden.sum().defined());
    const Tensor y = one(x);
    for (size_t i = 0; i < plain.size(); ++i) EXPECT_NEAR(values(y)[i], plain[i], 1e-12);
    other(x);
    EXPECT_NEAR(values(hidden.sum())[0], expected, 1e-12);
    tape.backward(hidden.sum());
    EXPECT_TRUE(grad(one.up.weight).defined());
    EXPECT_TRUE(grad(other.up.weight).defined());
  }
  EXPECT_FALSE(HiddenL1::wanted());
  const HiddenL1 hidden;
  Tape tape;
  const Mlp gated = squared(rng, true);
  EXPECT_NE(message_of([&] { gated(x); }).find("the L1 penalty is on activations that are not negative"),
            std::string::npos);
  one.up.form = Scaled{2};
  EXPECT_NE(message_of([&] { one(x); }).find("needs dense layers"), std::string::npos);
}

TEST(Sparse24Form, RefusesWhatItCannotBe) {
  Rng rng(1);
  Mlp gated = squared(rng, true), silu = squared(rng, false, ops::Activation::silu), mlp = squared(rng);
  EXPECT_EQ(
      message_of([&] { set_sparse24(gated, {}); }),
      "sparse24: the network has a gate, whose product with the hidden features has no zeros; it needs one "
      "without (relu or relu_squared)");
  EXPECT_EQ(message_of([&] { set_sparse24(silu, {}); }),
            "sparse24: the network's activation is silu, that of the form relu_squared");
  EXPECT_EQ(message_of([&] { set_sparse24(mlp, {.order = "zigzag"}); }),
            "sparse24: the order of tokens is \"zigzag\"; expected none, random or stride");
  EXPECT_EQ(message_of([&] { set_sparse24(mlp, {.how = {.method = ops::Method24::mvue}}); }),
            "sparse24: mvue draws random numbers, and there is no generator; set rng");
  Mlp scaled = squared(rng);
  scaled.down.form = Scaled{2};
  EXPECT_EQ(message_of([&] { set_sparse24(scaled, {}); }),
            "sparse24: a layer of the network has the form scaled; 2:4 activations need dense weights");
  mlp.up.form = Sparse24{};
  EXPECT_NE(message_of([&] {
              mlp(random({2, 12}, 1));
            }).find("set it with nn::set_sparse24"),
            std::string::npos);
  GroupedMlp grouped(2, 3, 7, 5, rng, kCpu, {.bias = false, .dtype = DType::f64});
  grouped.up.form = Sparse24{};
  EXPECT_NE(message_of([&] { grouped(random({4, 3}, 2)); }).find("have no sparse24 form"), std::string::npos);
}

}  // namespace
}  // namespace tessera::nn
