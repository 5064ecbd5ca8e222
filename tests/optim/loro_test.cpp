#include "optim/loro.h"

#include <cmath>

#include "gradients.h"
#include "ops/factor/factor.h"
#include "ops/matmul/matmul.h"
#include "ops/pointwise/pointwise.h"
#include "optim/adamw.h"
#include "tests/errors.h"
#include "tests/tensors.h"

namespace tessera::optim {
namespace {

constexpr int64_t kRank = 2, kIn = 7;
const std::vector<int64_t> kRows{5, 3};

/// The factors of a weight of two parts, and a norm.
std::vector<nn::NamedParameter> factors(DType dtype) {
  return {{"blocks.0.up.form.a", new_parameter(1, {2 * kRank, kIn}, dtype, kCpu)},
          {"blocks.0.up.form.b", new_parameter(2, {8, kRank}, dtype, kCpu)},
          {"norm.weight", new_parameter(3, {5}, dtype, kCpu)}};
}

LoroOptions loro_options(int64_t every) {
  return {.lr = 0.05, .every = every, .pairs = {{"blocks.0.up.form.a", "blocks.0.up.form.b", kRows}}};
}

Tensor zeros_like(const Tensor& t) {
  return Tensor::zeros(t.shape(), DType::f64, kCpu);
}

/// Adam's direction of one factor, in f64.
struct Adam {
  Tensor m, v;
  int t = 0;
  Tensor operator()(const Tensor& g) {
    if (t++ == 0) m = zeros_like(g), v = zeros_like(g);
    m = ops::add(ops::scale(m, 0.9), ops::scale(g, 0.1));
    v = ops::add(ops::scale(v, 0.999), ops::scale(ops::mul(g, g), 0.001));
    return ops::div(ops::scale(m, 1 / (1 - std::pow(0.9, t))),
                    ops::add(ops::scale(ops::sqrt(v), 1 / std::sqrt(1 - std::pow(0.999, t))),
                             Tensor::full({}, 1e-8, DType::f64, kCpu)));
  }
};

/// The triangular inverse by an SVD: another way than the rule's.
Tensor inverse(const Tensor& r) {
  const ops::SvdFactors parts = ops::svd(r);
  return ops::matmul(
      ops::mul(ops::matmul(parts.vt, Tensor::from(std::vector<double>{1, 0, 0, 1}, {2, 2}), true),
               ops::div(Tensor::full({kRank}, 1, DType::f64, kCpu), parts.s)),
      parts.u, false, true);
}

/// The exact step of the header on the whole matrix: the product after it, of rank 2 again.
Tensor exact_product(const Tensor& a, const Tensor& b, const Tensor& da, const Tensor& db, double lr,
                     double decay) {
  const ops::QrFactors qa = ops::qr(a.transpose(0, 1)), qb = ops::qr(b);
  const Tensor y = ops::matmul(db, inverse(qa.r)), z = ops::matmul(inverse(qb.r), da, true),
               outer = ops::sub(y, ops::matmul(qb.q, ops::matmul(qb.q, y, true))),
               tangent = ops::add(ops::matmul(outer, qa.q, false, true), ops::matmul(qb.q, z));
  const Tensor next = ops::sub(ops::scale(ops::matmul(b, a), 1 - lr * decay), ops::scale(tangent, lr));
  const ops::SvdFactors parts = ops::truncated_svd(next, kRank);
  return ops::matmul(ops::mul(parts.u, parts.s), parts.vt);
}

TEST(Loro, TakesCheapStepsAndExactOnes) {
  for (const LoroMoments moments : {LoroMoments::reset, LoroMoments::keep, LoroMoments::reset_all})
    for (const double scale : {-1.0, 0.5}) {
      LoroOptions options = loro_options(4);
      options.moments = moments, options.lr_scale = scale, options.weight_decay = 0.1;
      const std::vector<nn::NamedParameter> parameters = factors(DType::f64);
      const Tensor &a = parameters[0].tensor, &b = parameters[1].tensor, &norm = parameters[2].tensor;
      Loro optimizer(parameters, options);
      EXPECT_STREQ(optimizer.rule_of(0), "loro");
      EXPECT_STREQ(optimizer.rule_of(2), "adamw");
      const double cheap = scale == -1 ? 2.0 / 5 : scale;  // rank / min(7, 5)
      Adam of_a, of_b, of_norm;
      for (int step = 0; step < 9; ++step) {
        const Tensor before_a = a.detach().clone(), before_b = b.detach().clone(),
                     ga = gradient_of(0, step, a.shape()), gb = gradient_of(1, step, b.shape()),
                     da = of_a(ga), db = of_b(gb);
        const Tensor g = gradient_of(2, step, norm.shape()),
                     moved_norm = ops::sub(norm.detach(), ops::scale(of_norm(g), 0.05));
        arrive(a, ga), arrive(b, gb), arrive(norm, g);
        EXPECT_EQ(optimizer.waits_for_host(), step % 4 == 3);
        optimizer.step();
        optimizer.zero_grad();
        expect_near(norm, moved_norm, 1e-12);
        if (step % 4 != 3) {
          const auto moved = [&](const Tensor& w, const Tensor& d) {
            return ops::sub(ops::scale(w, 1 - 0.05 * cheap * 0.1), ops::scale(d, 0.05 * cheap));
          };
          expect_near(a, moved(before_a, da), 1e-12);
          expect_near(b, moved(before_b, db), 1e-12);
          continue;
        }
        int64_t row = 0;
        for (int64_t p = 0; p < 2; ++p) {
          const auto of_part = [&](const Tensor& t) {
            return t.detach().slice(0, p * kRank, (p + 1) * kRank);
          };
          const auto rows_of_part = [&](const Tensor& t) {
            return t.detach().slice(0, row, row + kRows[size_t(p)]);
          };
          expect_near(ops::matmul(rows_of_part(b), of_part(a)),
                      exact_product(of_part(before_a), rows_of_part(before_b), of_part(da), rows_of_part(db),
                                    0.05, 0.1),
                      1e-11);
          // Balanced: b^T b = a a^T, a diagonal.
          const Tensor gram = ops::matmul(rows_of_part(b), rows_of_part(b), true);
          expect_near(gram, ops::matmul(of_part(a), of_part(a), false, true), 1e-11);
          EXPECT_NEAR(gram.at({0, 1}).item<double>(), 0, 1e-11);
          row += kRows[size_t(p)];
        }
        if (moments != LoroMoments::keep) of_a = Adam(), of_b = Adam();
        if (moments == LoroMoments::reset_all) of_norm = Adam();
      }
      EXPECT_EQ(optimizer.report(), "");
    }
}

TEST(Loro, RefactorisationKeepsTheProduct) {
  LoroOptions options = loro_options(0);
  options.lr_scale = 1, options.refactor_every = 3;
  for (const DType dtype : {DType::f64, DType::bf16}) {
    const std::vector<nn::NamedParameter> parameters = factors(dtype);
    std::vector<nn::NamedParameter> twins;
    for (const nn::NamedParameter& parameter : parameters) {
      Tensor copy = parameter.tensor.detach().clone();
      nn::make_parameter(copy);
      twins.push_back({parameter.name, copy});
    }
    Loro optimizer(parameters, options);
    AdamW plain(twins, {.lr = 0.05, .weight_decay = 0});
    for (int step = 0; step < 3; ++step) {
      for (size_t i = 0; i < 2; ++i) {
        arrive(parameters[i].tensor, gradient_of(i, step, twins[i].tensor.shape()));
        arrive(twins[i].tensor, gradient_of(i, step, twins[i].tensor.shape()));
      }
      optimizer.step(), plain.step();
      optimizer.zero_grad(), plain.zero_grad();
    }
    const auto product = [](const std::vector<nn::NamedParameter>& list, int64_t part) {
      const Tensor a = list[0].tensor.detach().to(DType::f64), b = list[1].tensor.detach().to(DType::f64);
      return ops::matmul(part ? b.slice(0, 5, 8) : b.slice(0, 0, 5), a.slice(0, 2 * part, 2 * part + 2));
    };
    for (const int64_t part : {0, 1})
      expect_near(product(parameters, part), product(twins, part), dtype == DType::f64 ? 1e-12 : 0.03);
    bool moved = false;
    const std::vector<double> now = parameters[1].tensor.detach().to_vector<double>(),
                              then = twins[1].tensor.detach().to_vector<double>();
    for (size_t i = 0; i < now.size(); ++i) moved |= std::abs(now[i] - then[i]) > 1e-3;
    EXPECT_TRUE(moved);
  }
}

TEST(Loro, ASingularFactorIsAnErrorOrCounted) {
  const auto make = [](SingularFactor singular) {
    std::vector<nn::NamedParameter> parameters = factors(DType::f64);
    parameters[1].tensor.detach().slice(0, 5, 8).fill(0);  // b of the second part
    LoroOptions options = loro_options(1);
    options.singular = singular;
    return std::pair(parameters, Loro(parameters, options));
  };
  {
    auto [parameters, optimizer] = make(SingularFactor::error);
    const std::vector<double> before = parameters[0].tensor.detach().to_vector<double>();
    for (size_t i = 0; i < 2; ++i)
      arrive(parameters[i].tensor, gradient_of(i, 0, parameters[i].tensor.shape()));
    expect_error([&, &o = optimizer] { o.step(); },
                 {"blocks.0.up.form.b", "part 1, is singular", "--factor-init", "--loro-singular cheap"});
    EXPECT_EQ(parameters[0].tensor.detach().to_vector<double>(), before);  // that of the first part, too
  }
  auto [parameters, optimizer] = make(SingularFactor::cheap);
  for (int step = 0; step < 2; ++step) {
    for (size_t i = 0; i < 2; ++i)
      arrive(parameters[i].tensor, gradient_of(i, step, parameters[i].tensor.shape()));
    optimizer.step();
    optimizer.zero_grad();
  }
  EXPECT_EQ(optimizer.report(),
            "loro: 1 of 4 exact steps of a matrix were cheap ones instead, because a factor was singular\n");
}

TEST(Loro, GroupsOfTheCallerCount) {
  LoroOptions options = loro_options(0);
  options.lr_scale = 1;
  options.groups = {{.contains = "form.a", .lr_scale = 0}};
  const std::vector<nn::NamedParameter> parameters = factors(DType::f64);
  Loro optimizer(parameters, options);
  const std::vector<double> a = parameters[0].tensor.detach().to_vector<double>(),
                            b = parameters[1].tensor.detach().to_vector<double>();
  for (size_t i = 0; i < 2; ++i)
    arrive(parameters[i].tensor, gradient_of(i, 0, parameters[i].tensor.shape()));
  optimizer.step();
  EXPECT_EQ(parameters[0].tensor.detach().to_vector<double>(), a);
  EXPECT_NE(parameters[1].tensor.detach().to_vector<double>(), b);
}

TEST(AdamW, BeginsItsMomentsAgain) {
  Tensor w = new_parameter(1, {4}, DType::f64, kCpu), twin = w.detach().clone();
  nn::make_parameter(twin);
  AdamW optimizer({{"w", w}}, {.lr = 0.1, .momentum_reset = 3});
  auto plain = std::make_unique<AdamW>(std::vector<nn::NamedParameter>{{"w", twin}}, AdamWOptions{.lr = 0.1});
  for (int step = 0; step < 8; ++step) {
    if (step % 3 == 0) {
      Tensor fresh = twin.detach().clone();
      nn::make_parameter(fresh);
      twin = fresh;
      plain = std::make_unique<AdamW>(std::vector<nn::NamedParameter>{{"w", twin}}, AdamWOptions{.lr = 0.1});
    }
    const Tensor g = gradient_of(0, step, w.shape());
    arrive(w, g), arrive(twin, g);
    optimizer.step(), plain->step();
    optimizer.zero_grad(), plain->zero_grad();
    EXPECT_EQ(w.detach().to_vector<double>(), twin.detach().to_vector<double>()) << step;
  }
  EXPECT_EQ(optimizer.steps(), 8);
  expect_error(
      [&] {
        AdamW({{"x", new_parameter(2, {2}, DType::f64, kCpu)}}, {.momentum_reset = -1});
      },
      {"momentum_reset = -1"});
}

TEST(Loro, SaysWhatIsWrong) {
  const auto fails = [](const LoroOptions& options, std::initializer_list<const char*> parts) {
    expect_error([&] { Loro(factors(DType::f32), options); }, parts);
  };
  fails({}, {"no weights made of two factors", "--form low_rank"});
  LoroOptions options = loro_options(-1);
  fails(options, {"every = -1"});
  options = loro_options(2);
  options.lr_scale = 0;
  fails(options, {"--loro-lr-scale", "0; expected more than 0, or -1"});
  options = loro_options(2);
  options.pairs[0].b = "blocks.0.up.form.c";
  fails(options, {"no parameters blocks.0.up.form.a and blocks.0.up.form.c"});
  options = loro_options(2);
  options.pairs[0].rows = {5, 2};
  fails(options, {"are not the factors of 2 parts of 7 rows"});
  options = loro_options(2);
  options.moments = LoroMoments::reset_all, options.momentum_reset = 3;
  fails(options, {"momentum_reset = 3", "give one"});
  expect_error([] { parse_singular_factor("skip"); }, {"\"skip\"", "error or cheap"});
  expect_error([] { parse_loro_moments("all"); }, {"\"all\"", "reset, keep or reset_all"});
}

}  // namespace
}  // namespace tessera::optim
