#include "optim/galore.h"

#include <cmath>
#include <functional>
#include <memory>

#include "gradients.h"
#include "ops/factor/factor.h"
#include "ops/matmul/matmul.h"
#include "ops/pointwise/pointwise.h"
#include "optim/adamw.h"
#include "optim/bundled.h"
#include "runtime/capture.h"
#include "tests/errors.h"
#include "tests/nn/no_recorder.h"
#include "tests/tensors.h"

namespace tessera::optim {
namespace {

const Shape kTall{9, 5}, kWide{4, 11};

std::vector<nn::NamedParameter> two_matrices(DType dtype) {
  return {{"blocks.0.up.weight", new_parameter(1, kTall, dtype, kCpu)},
          {"blocks.0.down.weight", new_parameter(2, kWide, dtype, kCpu)},
          {"norm.weight", new_parameter(3, {5}, dtype, kCpu)}};
}

/// One matrix by the formulas of the header, in f64.
struct GaloreReference {
  GaloreOptions options;
  Tensor u, vt, m, v;

  bool from_right(const Tensor& w) const {
    const bool tall = w.size(0) >= w.size(1);
    switch (options.projection) {
      case GaloreProjection::std:
        return tall;
      case GaloreProjection::reverse_std:
        return !tall;
      default:
        return options.projection != GaloreProjection::left;
    }
  }
  bool from_left(const Tensor& w) const {
    return options.projection == GaloreProjection::full || !from_right(w);
  }

  /// `t`: steps since the moments began, from 1.
  void step(const Tensor& w, const Tensor& g, int index, int t, double lr) {
    if (index % options.every == 0) {
      const ops::SvdFactors made = ops::truncated_svd(g, options.rank);
      u = made.u, vt = made.vt;
    }
    Tensor low = g;
    if (from_left(w)) low = ops::matmul(u, low, true);
    if (from_right(w)) low = ops::matmul(low, vt, false, true);
    if (!m.defined() || t == 1)
      m = Tensor::zeros(low.shape(), DType::f64, kCpu), v = Tensor::zeros(low.shape(), DType::f64, kCpu);
    m = ops::add(ops::scale(m, options.beta1), ops::scale(low, 1 - options.beta1));
    v = ops::add(ops::scale(v, options.beta2), ops::scale(ops::mul(low, low), 1 - options.beta2));
    const Tensor root = ops::add(ops::scale(ops::sqrt(v), 1 / std::sqrt(1 - std::pow(options.beta2, t))),
                                 Tensor::full({}, options.eps, DType::f64, kCpu));
    Tensor direction = ops::div(ops::scale(m, 1 / (1 - std::pow(options.beta1, t))), root);
    if (from_left(w)) direction = ops::matmul(u, direction);
    if (from_right(w)) direction = ops::matmul(direction, vt);
    w.copy_from(
        ops::sub(ops::scale(w, 1 - lr * options.weight_decay), ops::scale(direction, lr * options.scale)));
  }
};

TEST(Galore, IsTheFormulaForEveryProjection) {
  for (const GaloreProjection projection :
       {GaloreProjection::std, GaloreProjection::reverse_std, GaloreProjection::right, GaloreProjection::left,
        GaloreProjection::full})
    for (const int64_t reset : {0, 5}) {
      GaloreOptions options{.lr = 0.1,
                            .rank = 3,
                            .every = 4,
                            .scale = 0.5,
                            .projection = projection,
                            .weight_decay = 0.1,
                            .momentum_reset = reset};
      const std::vector<nn::NamedParameter> parameters = two_matrices(DType::f64);
      Galore optimizer(parameters, options);
      EXPECT_STREQ(optimizer.rule_of(0), "galore");
      EXPECT_STREQ(optimizer.rule_of(2), "adamw");
      GaloreReference references[2] = {{options}, {options}};
      Tensor weights[2] = {parameters[0].tensor.detach().clone(), parameters[1].tensor.detach().clone()};
      for (int step = 0; step < 11; ++step) {
        const int t = reset ? step % int(reset) + 1 : step + 1;
        for (size_t i = 0; i < 2; ++i) {
          const Tensor g = gradient_of(i, step, parameters[i].tensor.shape());
          arrive(parameters[i].tensor, g);
          references[i].step(weights[i], g, step, t, options.lr);
        }
        optimizer.step();
        optimizer.zero_grad();
        for (size_t i = 0; i < 2; ++i) expect_near(parameters[i].tensor, weights[i], 1e-11);
      }
    }
}

TEST(Galore, TreatsThePartsOfAFusedWeightOnTheirOwn) {
  const Shape shape{9, 7};
  GaloreOptions options{.lr = 0.1, .rank = 2, .every = 3, .matrices = {{"blocks.0.qkv.weight", {5, 2, 2}}}};
  const Tensor fused = new_parameter(1, shape, DType::f64, kCpu);
  std::vector<nn::NamedParameter> apart;
  std::vector<Tensor> parts;
  int64_t row = 0;
  for (const int64_t rows : {5, 2, 2}) {
    Tensor part = fused.detach().slice(0, row, row + rows).clone();
    nn::make_parameter(part);
    apart.push_back({"blocks.0." + std::to_string(row) + ".weight", part});
    row += rows;
  }
  Galore one({{"blocks.0.qkv.weight", fused}}, options);
  Galore several(apart, options);
  for (int step = 0; step < 7; ++step) {
    const Tensor g = gradient_of(0, step, shape);
    arrive(fused, g);
    row = 0;
    for (const nn::NamedParameter& part : apart) {
      arrive(part.tensor, g.slice(0, row, row + part.tensor.size(0)));
      row += part.tensor.size(0);
    }
    for (Galore* const optimizer : {&one, &several}) optimizer->step(), optimizer->zero_grad();
  }
  row = 0;
  for (const nn::NamedParameter& part : apart) {
    expect_near(part.tensor, fused.detach().slice(0, row, row + part.tensor.size(0)), 1e-13);
    row += part.tensor.size(0);
  }
}

TEST(Galore, TreatsEachGroupOfAWeightOnItsOwn) {
  const Shape shape{3, 5, 7};
  const GaloreOptions options{.lr = 0.1, .rank = 2, .every = 3};
  for (const DType dtype : {DType::f64, DType::bf16}) {
    const Tensor grouped = new_parameter(1, shape, dtype, kCpu);
    std::vector<nn::NamedParameter> apart;
    for (int i = 0; i < 3; ++i) {
      Tensor part = grouped.detach().select(0, i).clone();
      nn::make_parameter(part);
      apart.push_back({"blocks.0.up." + std::to_string(i) + ".weight", part});
    }
    Galore one({{"blocks.0.up.weight", grouped}}, options);
    Galore several(apart, options);
    for (int step = 0; step < 7; ++step) {
      const Tensor g = gradient_of(0, step, shape);
      arrive(grouped, g);
      for (int i = 0; i < 3; ++i) arrive(apart[size_t(i)].tensor, g.select(0, i));
      for (Galore* const optimizer : {&one, &several}) optimizer->step(), optimizer->zero_grad();
    }
    for (int i = 0; i < 3; ++i) {
      SCOPED_TRACE(i);
      EXPECT_EQ(apart[size_t(i)].tensor.detach().to(DType::f64).to_vector<double>(),
                grouped.detach().select(0, i).to(DType::f64).to_vector<double>());
    }
  }
}

TEST(Galore, OfFullRankWithoutAProjectionIsAdam) {
  // A square orthogonal projection turns Adam's space, so only a rank-one gradient whose space is an axis
  // compares.
  const Shape shape{3, 4};
  std::vector<double> axis(12);
  for (int i = 0; i < 4; ++i) axis[size_t(4 + i)] = i == 2 ? 3 : 0;  // element (1, 2) alone
  const Tensor g = Tensor::from(axis, shape), w = new_parameter(1, shape, DType::f64, kCpu),
               other = w.detach().clone();
  Tensor twin = other;
  nn::make_parameter(twin);
  Galore galore({{"blocks.w", w}}, {.lr = 0.1, .rank = 1, .every = 2, .scale = 1});
  AdamW adam({{"blocks.w", twin}}, {.lr = 0.1, .weight_decay = 0});
  for (int step = 0; step < 5; ++step) {
    arrive(w, g), arrive(twin, g);
    galore.step(), adam.step();
    galore.zero_grad(), adam.zero_grad();
  }
  expect_near(w, twin, 1e-12);
}

TEST(Galore, SkippedStepsChangeNothingAndAreMadeUpFor) {
  for (const int bad : {0, 4}) {  // the first factorisation, and the second
    const std::vector<nn::NamedParameter> parameters = two_matrices(DType::f32);
    Galore optimizer(parameters, {.lr = 0.1, .rank = 2, .every = 4});
    for (int step = 0; step < 9; ++step) {
      const std::vector<double> before = parameters[0].tensor.to_vector<double>();
      for (size_t i = 0; i < 2; ++i) {
        Tensor g = gradient_of(i, step, parameters[i].tensor.shape());
        if (step == bad) g.fill(NAN);
        arrive(parameters[i].tensor, g);
      }
      EXPECT_EQ(optimizer.waits_for_host(), step % 4 == 0 || step == bad + 1) << step;
      optimizer.step();
      optimizer.zero_grad();
      EXPECT_EQ(before == parameters[0].tensor.to_vector<double>(), step == bad) << step;
      if (step == bad + 1) break;
    }
    EXPECT_EQ(optimizer.skipped(), 1);
  }
}

/// Runs `steps` steps and returns the weights; saves the state after `save_after` and goes on with a new
/// optimizer.
std::vector<double> trained(const std::function<Optimizer(std::vector<nn::NamedParameter>)>& make, int steps,
                            int resume_after, DType dtype) {
  std::vector<nn::NamedParameter> parameters = two_matrices(dtype);
  auto optimizer = std::make_unique<Optimizer>(make(parameters));
  for (int step = 0; step < steps; ++step) {
    if (step == resume_after) {
      std::vector<nn::NamedParameter> fresh;
      for (const nn::NamedParameter& parameter : parameters) {
        Tensor copy = parameter.tensor.detach().clone();
        nn::make_parameter(copy);
        fresh.push_back({parameter.name, copy});
      }
      auto next = std::make_unique<Optimizer>(make(fresh));
      std::map<std::string, Tensor> saved;
      for_each_field(*optimizer, [&](const std::string& name, auto& leaf) {
        if constexpr (std::is_same_v<std::remove_cvref_t<decltype(leaf)>, Tensor>) saved.emplace(name, leaf);
      });
      for_each_field(*next, [&](const std::string& name, auto& leaf) {
        if constexpr (std::is_same_v<std::remove_cvref_t<decltype(leaf)>, Tensor>)
          leaf.copy_from(saved.at(name));
      });
      parameters = fresh, optimizer = std::move(next);
    }
    for (size_t i = 0; i < parameters.size(); ++i)
      arrive(parameters[i].tensor, gradient_of(i, step, parameters[i].tensor.shape()));
    optimizer->step();
    optimizer->zero_grad();
  }
  std::vector<double> all;
  for (const nn::NamedParameter& parameter : parameters)
    for (const double value : parameter.tensor.detach().to_vector<double>()) all.push_back(value);
  return all;
}

TEST(Galore, GoesOnWithTheSameBits) {
  for (const GaloreSvd svd : {GaloreSvd::exact, GaloreSvd::sketch}) {
    const auto make = [&](std::vector<nn::NamedParameter> parameters) {
      return Optimizer(
          Galore(std::move(parameters), {.lr = 0.1, .rank = 2, .every = 3, .svd = svd, .momentum_reset = 4}));
    };
    // bf16 has masters; in f32 no rounding hides what other random numbers of a sketch would change.
    for (const DType dtype : {DType::bf16, DType::f32}) {
      const std::vector<double> whole = trained(make, 10, -1, dtype);
      for (const int after : {1, 3, 4, 5, 8}) EXPECT_EQ(trained(make, 10, after, dtype), whole) << after;
    }
  }
}

TEST(Galore, IsCapturedBetweenFactorisations) {
  const auto run = [](bool captured) {
    const std::vector<nn::NamedParameter> parameters = two_matrices(DType::f32);
    Galore optimizer(parameters, {.lr = 0.1, .rank = 2, .every = 5, .momentum_reset = 7});
    optimizer.complete_gradients();
    int step = 0, eager = 0;
    Captured body(
        kCpu, [&] { optimizer.step(); }, std::make_unique<nn::NoRecorder>());
    for (; step < 13; ++step) {
      std::optional<EagerScope> scope;
      if (optimizer.waits_for_host()) scope.emplace(), ++eager;
      if (captured) {
        body();
      } else {
        optimizer.step();
      }
    }
    return eager;
  };
  EXPECT_EQ(run(false), 4);  // steps 0, 5, 10, and the reset after the 7th
  EXPECT_EQ(run(true), 4);   // launches count as steps

  const std::vector<nn::NamedParameter> parameters = two_matrices(DType::f32);
  Galore optimizer(parameters, {.lr = 0.1, .rank = 2, .every = 5});
  optimizer.complete_gradients();
  Captured body(
      kCpu, [&] { optimizer.step(); }, std::make_unique<nn::NoRecorder>());
  body();
  for (int i = 0; i < 4; ++i) body();
  expect_error([&] { body(); }, {"GaLore: this step factorises", "EagerScope", "waits_for_host"});
}

// The host would count one step per launch.
TEST(Galore, ASecondStepInOneCapturedBodyIsRefused) {
  Galore optimizer(two_matrices(DType::f32), {.lr = 0.1, .rank = 2, .every = 5});
  AdamW plain(two_matrices(DType::f32), {.lr = 0.1});
  optimizer.complete_gradients(), plain.complete_gradients();
  const auto capture = [](Optimizer& one) {
    Captured body(
        kCpu, [&] { one.step(), one.step(); }, std::make_unique<nn::NoRecorder>());
    body(), body();
  };
  capture(plain);
  expect_error([&] { capture(optimizer); }, {"GaLore: a second step()", "one step per body"});
}

TEST(Galore, SaysWhatIsWrong) {
  const auto fails = [](const GaloreOptions& options, std::initializer_list<const char*> parts) {
    expect_error([&] { Galore(two_matrices(DType::f32), options); }, parts);
  };
  fails({.rank = 0}, {"rank (--galore-rank) is 0", "1 or more"});
  fails({.rank = 5}, {"rank (--galore-rank) is 5", "blocks.0.down.weight has 4 x 11", "at most 4"});
  fails({.rank = 2, .every = 0}, {"0 steps between two factorisations"});
  fails({.rank = 2, .scale = 0}, {"scale (--galore-scale) is 0"});
  fails({.rank = 2, .momentum_reset = -1}, {"momentum_reset = -1"});
  fails({.rank = 2, .beta1 = 1}, {"beta1 = 1"});
  fails({.rank = 2, .matrices = {{"blocks.0.up.weight", {3, 3}}}}, {"blocks.0.up.weight do not add up"});
  fails({.rank = 1, .groups = {{.contains = "norm", .rule = "galore"}}}, {"norm.weight", "is no matrix"});
  expect_error([] { parse_galore_projection("both"); },
               {"\"both\"", "std, reverse_std, right, left or full"});
  expect_error([] { parse_galore_svd("fast"); }, {"\"fast\"", "exact or sketch"});
}

}  // namespace
}  // namespace tessera::optim
