#include "nn/sparse24.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "autograd/checkpoint.h"
#include "nn/hidden_l1.h"
#include "nn/low_rank.h"
#include "nn/observe.h"
#include "ops/linear/linear.h"
#include "ops/mlp/mlp.h"
#include "ops/pointwise/pointwise.h"
#include "ops/reduce/reduce.h"
#include "ops/shape/shape.h"
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

/// Losses and gradients of some steps of a model 12 -> 12, and the state of its forms after each.
template <class Model>
std::vector<std::vector<double>> train_24(Model& model, bool recompute) {
  std::vector<std::vector<double>> seen;
  for (uint64_t step = 0; step < 4; ++step) {
    zero_grad(model);
    Tape tape;
    const auto twice = [&](const Tensor& x) { return model(model(x)); };
    const Tensor x = random({16, 12}, 2 + step), y = recompute ? checkpoint(twice, x) : twice(x);
    const Tensor loss = ops::sum(ops::mul(y, y));
    tape.backward(loss);
    seen.push_back({loss.item<double>()});
    for (const NamedParameter& weight : parameters(model)) seen.push_back(values(grad(weight.tensor)));
    const auto add_state = [&](const Sparse24& now) {
      seen.push_back(values(now.counts));
      seen.push_back({double(now.dynamic.step), values(now.dynamic.scale)[0]});
    };
    if constexpr (std::is_same_v<Model, Mlp>)
      add_state(*sparse24_of(model));
    else
      for (const Sparse24& part : sparse24_of(std::as_const(model))) add_state(part);
  }
  return seen;
}

/// Settings in which a call depends on what earlier ones left, or draws.
std::vector<ops::MlpSparse24> settings_with_state() {
  const ops::MlpSparse24 split{.dense_share = 0.2};
  ops::MlpSparse24 dynamic = split, drawn = split;
  dynamic.method = ops::Method24::soft_dynamic;
  drawn.method = ops::Method24::mvue;
  return {split, dynamic, drawn};
}

/// `make(form)`: a model with it.
template <class Make>
void expect_recomputed_alike(const Make& make) {
  for (const ops::MlpSparse24& how : settings_with_state()) {
    SCOPED_TRACE(name_of(how.method));
    const auto run = [&](bool recompute) {
      Rng choices(2);
      Sparse24 form{.how = how};
      form.how.rng = choices;
      form.dynamic.interval = 3;
      auto model = make(form);
      return train_24(model, recompute);
    };
    const auto plain = run(false), again = run(true);
    EXPECT_EQ(again, plain);
    EXPECT_EQ(plain.back()[0], how.method == ops::Method24::soft_dynamic ? 8 : 0) << "two calls a step";
  }
}

TEST(Sparse24Form, IsRecomputedWithTheColumnsAndTheScaleOfTheFirstRun) {
  expect_recomputed_alike([](const Sparse24& form) {
    Rng rng(1);
    Mlp mlp = squared(rng);
    set_sparse24(mlp, form);
    return mlp;
  });
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
            "sparse24: a layer of the network has the form scaled; 2:4 activations need dense weights, or "
            "low_rank ones in both layers");
  mlp.up.form = Sparse24{};
  EXPECT_NE(message_of([&] {
              mlp(random({2, 12}, 1));
            }).find("set it with nn::set_sparse24"),
            std::string::npos);
  GroupedMlp grouped(2, 3, 7, 5, rng, kCpu, {.bias = false, .dtype = DType::f64});
  grouped.up.form = Sparse24{};
  EXPECT_NE(message_of([&] { grouped(random({4, 3}, 2)); }).find("have no sparse24 form"), std::string::npos);
}

// ---- of layers made of factors ----

constexpr ops::Activation kSquared = ops::Activation::relu_squared;

/// A cola layer 12 -> 14 of rank 6, whose last group of four has two features.
Linear cola(const std::vector<int64_t>& rows, ops::Activation kind = kSquared) {
  Rng rng(1);
  Linear layer(12, 14, rng, kCpu, {.dtype = DType::f64});
  factorize(layer, rows, {.kind = FactorKind::cola, .rank = 6, .activation = kind}, rng);
  for (const NamedParameter& one : parameters(layer))
    one.tensor.detach().copy_from(random(one.tensor.shape(), 5 + one.name.size()));
  return layer;
}
const std::vector<std::vector<int64_t>> kParts = {{14}, {7, 7}, {8, 6}};

/// A network 12 -> 40 -> 12 of low_rank layers of the ranks 6 and 5.
Mlp low_rank_mlp() {
  Rng rng(1);
  Mlp mlp(12, 40, rng, kCpu, {.activation = kSquared, .dtype = DType::f64});
  factorize(mlp.up, {40}, {.kind = FactorKind::low_rank, .rank = 6}, rng);
  factorize(mlp.down, {12}, {.kind = FactorKind::low_rank, .rank = 5}, rng);
  return mlp;
}

/// 1 where an element is one of the two largest of four neighbours of its row, of equal ones the first.
Tensor two_of_four(const Tensor& a) {
  const std::vector<double> at = values(a);
  const size_t columns = size_t(a.size(-1));
  std::vector<double> keeps(at.size(), 0);
  for (size_t row = 0; row < at.size(); row += columns)
    for (size_t first = 0; first < columns; first += 4) {
      std::vector<size_t> group;
      for (size_t i = first; i < std::min(columns, first + 4); ++i) group.push_back(row + i);
      std::ranges::stable_sort(group, [&](size_t l, size_t r) { return at[l] > at[r]; });
      for (size_t i = 0; i < std::min<size_t>(2, group.size()); ++i) keeps[group[i]] = 1;
    }
  return Tensor::from(keeps, a.shape());
}
Tensor masked(const Tensor& activations) {
  return ops::mul(activations, two_of_four(activations.detach()));
}
Tensor hidden_of(const Tensor& x, const Tensor& a) {
  return ops::activation(ops::linear(x, a), kSquared);
}

/// y, and the gradients of the input, the residual and the parameters: run(x, residual) on a tape.
template <class Model, class Run>
std::vector<std::vector<double>> results_of(const Model& model, int64_t out, const Run& run) {
  Tensor x = random({16, 12}, 2), residual = random({16, out}, 3);
  require_grad(x, DType::f64), require_grad(residual, DType::f64);
  zero_grad(model);
  Tape tape;
  const Tensor y = run(x, residual), loss = ops::sum(ops::mul(y, y));
  tape.backward(loss);
  std::vector<std::vector<double>> all{values(y.detach()), values(grad(x)), values(grad(residual))};
  for (const NamedParameter& one : parameters(model)) all.push_back(values(grad(one.tensor)));
  return all;
}

void expect_alike(const std::vector<std::vector<double>>& results,
                  const std::vector<std::vector<double>>& expected) {
  ASSERT_EQ(results.size(), expected.size());
  for (size_t k = 0; k < results.size(); ++k) {
    ASSERT_EQ(results[k].size(), expected[k].size());
    // Sums in another order, of terms up to 1e6: errors up to 1e-9.
    for (size_t i = 0; i < results[k].size(); ++i)
      EXPECT_NEAR(results[k][i], expected[k][i], 1e-8 * std::max(1.0, std::abs(expected[k][i])))
          << "result " << k << ", element " << i;
  }
}
double furthest(const std::vector<double>& a, const std::vector<double>& b) {
  double most = 0;
  for (size_t i = 0; i < a.size(); ++i) most = std::max(most, std::abs(a[i] - b[i]));
  return most;
}

/// Every GEMM over features is sparse, and gradients of weights keep all tokens: then all gradients are those
/// of the function with the mask as a constant.
ops::MlpSparse24 features_alone() {
  return {.y = ops::Gemm24::sparse,
          .dx = ops::Gemm24::sparse,
          .dup = ops::Gemm24::dense,
          .ddown = ops::Gemm24::dense};
}

TEST(Sparse24Form, OfColaIsTheDenseLayerUnderItsMask) {
  for (const auto& rows : kParts) {
    SCOPED_TRACE(rows.size());
    Linear layer = cola(rows);
    const Tensor x = random({16, 12}, 2);
    const std::vector<double> dense = values(layer(x));
    set_sparse24(layer, {.how = features_alone()});
    ASSERT_EQ(sparse24_of(layer).size(), rows.size());
    EXPECT_EQ(values(layer(x)), dense);  // no tape
    const auto by_definition = [&](const Tensor& in, const Tensor& residual) {
      const Factors& f = std::get<Cola>(layer.form).factors;
      std::vector<Tensor> parts;
      int64_t row = 0, p = 0;
      for (const int64_t count : rows) {
        const Tensor a = ops::slice(f.a, 0, 6 * p, 6 * (p + 1)), b = ops::slice(f.b, 0, row, row + count);
        parts.push_back(ops::linear(masked(hidden_of(in, a)), b));
        row += count, p += 1;
      }
      return ops::add(ops::add(ops::concat(parts, -1), layer.bias), residual);
    };
    const auto sparse =
        results_of(layer, 14, [&](const Tensor& in, const Tensor& residual) { return layer(in, residual); });
    expect_alike(sparse, results_of(layer, 14, by_definition));
    // The mask drops something; in a dense step nothing is dropped.
    EXPECT_GT(furthest(sparse[0], values(ops::add(layer(x), random({16, 14}, 3)))), 0.1);
    for (Sparse24& part : sparse24_of(layer)) part.active = false;
    Tape tape;
    const std::vector<double> inactive = values(layer(x).detach());
    for (size_t i = 0; i < dense.size(); ++i)
      EXPECT_NEAR(inactive[i], dense[i], 1e-10 * std::max(1.0, std::abs(dense[i])));
  }
}

TEST(Sparse24Form, OfColaIsTheNetworkWithTheFactorsAsWeights) {
  for (const auto& rows : kParts) {
    Linear layer = cola(rows);
    const ops::MlpSparse24 how{.dense_share = 0.2};
    set_sparse24(layer, {.how = how});
    std::vector<Tensor> counts(rows.size());  // of the previous call, of each part
    for (const uint64_t seed : {2, 3}) {
      const Tensor x = random({16, 12}, seed);
      std::vector<Tensor> parts;
      int64_t row = 0;
      const std::vector<FactorPair> pairs = pairs_of(*factors_of(layer.form));
      for (size_t p = 0; p < pairs.size(); ++p) {
        ops::MlpSparse24 call = how;
        call.previous = counts[p];
        const auto [b, a] = pairs[p];
        const ops::MlpSparse24Result result =
            ops::mlp_sparse24(x, a, b, call, {}, layer.bias.detach().slice(0, row, row + b.size(0)).clone());
        parts.push_back(result.y);
        counts[p] = result.counts;
        row += b.size(0);
      }
      Tape tape;
      EXPECT_EQ(values(layer(x).detach()), values(ops::concat(parts, -1)));
      for (size_t p = 0; p < parts.size(); ++p)
        EXPECT_EQ(values(sparse24_of(layer)[p].counts), values(counts[p])) << "part " << p;
    }
  }
}

TEST(Sparse24Form, OfColaIsRecomputedAlike) {
  for (const std::vector<int64_t>& rows : {std::vector<int64_t>{12}, {7, 5}})
    expect_recomputed_alike([&](const Sparse24& form) {
      Rng rng(1);
      Linear layer(12, 12, rng, kCpu, {.dtype = DType::f64});
      factorize(layer, rows, {.kind = FactorKind::cola, .rank = 5, .activation = kSquared}, rng);
      set_sparse24(layer, form);
      return layer;
    });
}

TEST(Sparse24Form, OfLowRankLayersIsBetweenTheirOuterFactors) {
  Mlp mlp = low_rank_mlp();
  const Tensor x = random({16, 12}, 2);
  const std::vector<double> dense = values(mlp(x));
  set_sparse24(mlp, {.how = features_alone()});
  EXPECT_STREQ(name_of(mlp.up.form), "low_rank");
  EXPECT_EQ(values(mlp(x)), dense);  // no tape
  {
    const Observe observed(mlp, {.forward = [](const LinearCall&) {}});
    EXPECT_EQ(values(recorded(mlp, x)), dense);  // layer by layer
  }
  const Factors &up = std::get<LowRank>(mlp.up.form).factors,
                &down = std::get<LowRank>(mlp.down.form).factors;
  const auto by_definition = [&](const Tensor& in, const Tensor& residual) {
    const Tensor h = ops::linear(ops::linear(in, up.a), up.b, mlp.up.bias);
    const Tensor kept = masked(ops::activation(h, kSquared));
    return ops::linear(ops::linear(kept, down.a), down.b, mlp.down.bias, residual);
  };
  const auto sparse =
      results_of(mlp, 12, [&](const Tensor& in, const Tensor& residual) { return mlp(in, residual); });
  expect_alike(sparse, results_of(mlp, 12, by_definition));
  EXPECT_GT(furthest(values(recorded(mlp, x)), dense), 1e-4);
  sparse24_of(mlp)->active = false;
  const std::vector<double> inactive = values(recorded(mlp, x));
  for (size_t i = 0; i < dense.size(); ++i) EXPECT_NEAR(inactive[i], dense[i], 1e-12);
  expect_recomputed_alike([](const Sparse24& form) {
    Mlp made = low_rank_mlp();
    set_sparse24(made, form);
    return made;
  });
}

TEST(Sparse24Form, OfFactorsIsStateAndPartOfWhatAGraphDependsOn) {
  Linear layer = cola({8, 6});
  Mlp mlp = low_rank_mlp();
  set_sparse24(layer, {});
  set_sparse24(mlp, {});
  std::vector<std::string> names;
  for_each_field(layer, [&](const std::string& name, auto&) { names.push_back(name); });
  for_each_field(mlp, [&](const std::string& name, auto&) { names.push_back(name); });
  for (const char* name : {"form.sparse24.1.counts", "form.sparse24.0.scale", "up.form.sparse24.0.counts"})
    EXPECT_NE(std::ranges::find(names, name), names.end()) << name;
  EXPECT_EQ(parameters(layer).size(), 3u);  // a, b, bias
  for (const Form& form : {layer.form, mlp.up.form}) {
    Form other = form;
    EXPECT_EQ(form, other);
    if (auto* const factors = std::get_if<Cola>(&other))
      factors->sparse24[1].active = false;
    else
      std::get<LowRank>(other).sparse24[0].active = false;
    EXPECT_NE(form, other);
  }
}

TEST(Sparse24Form, OfFactorsIsRefusedWhereActivationsHaveNoZerosOrLayersNoActivation) {
  Linear silu = cola({14}, ops::Activation::silu);
  EXPECT_EQ(message_of([&] { set_sparse24(silu, {}); }),
            "sparse24: the activation between the layer's factors is silu, that of the form relu_squared");
  Mlp mlp = low_rank_mlp(), mixed = low_rank_mlp();
  mixed.down.form = Scaled{2};
  EXPECT_EQ(message_of([&] { set_sparse24(mlp.up, {}); }),
            "sparse24: the layer has the form low_rank; of linear layers only cola has activations inside");
  EXPECT_NE(message_of([&] {
              set_sparse24(mixed, {});
            }).find("has the form low_rank; 2:4 activations need dense weights, or low_rank ones in both"),
            std::string::npos);
  set_sparse24(mlp, {});
  mlp.down.form = Scaled{2};
  EXPECT_NE(message_of([&] {
              mlp(random({2, 12}, 1));
            }).find("the first layer is low_rank with 2:4 activations, but the second is scaled"),
            std::string::npos);
}

}  // namespace
}  // namespace tessera::nn
