#include "optim/muon.h"

#include <algorithm>
#include <cmath>

#include "gradients.h"
#include "ops/pointwise/pointwise.h"
#include "optim/adamw.h"
#include "optim/sgd.h"
#include "runtime/allocator.h"
#include "runtime/capture.h"
#include "tests/errors.h"

namespace tessera::optim {
namespace {

using Matrix = std::vector<double>;  // row by row

Matrix product(const Matrix& a, const Matrix& b, size_t m, size_t k, size_t n) {
  Matrix d(m * n);
  for (size_t i = 0; i < m; ++i)
    for (size_t l = 0; l < k; ++l)
      for (size_t j = 0; j < n; ++j) d[i * n + j] += a[i * k + l] * b[l * n + j];
  return d;
}

Matrix transposed(const Matrix& a, size_t m, size_t n) {
  Matrix t(a.size());
  for (size_t i = 0; i < m; ++i)
    for (size_t j = 0; j < n; ++j) t[j * m + i] = a[i * n + j];
  return t;
}

double frobenius_norm(const Matrix& a) {
  double sum = 0;
  for (const double value : a) sum += value * value;
  return std::sqrt(sum);
}

/// The iteration as the paper has it: a X + b (X X^T) X + c (X X^T)^2 X, from the left whatever the shape.
Matrix newton_schulz(const Matrix& direction, size_t m, size_t n, int iterations) {
  Matrix x = direction;
  const double norm = frobenius_norm(x);
  for (double& value : x) value /= norm;
  for (int k = 0; k < iterations; ++k) {
    const Matrix gram = product(x, transposed(x, m, n), m, n, m), gx = product(gram, x, m, m, n),
                 ggx = product(gram, gx, m, m, n);
    for (size_t i = 0; i < x.size(); ++i) x[i] = 3.4445 * x[i] - 4.7750 * gx[i] + 2.0315 * ggx[i];
  }
  return x;
}

/// Muon's and AdamW's rules in f64.
struct MuonReference {
  MuonOptions options;
  std::vector<double> m, v;
  void step(Matrix& w, const Matrix& g, size_t rows, size_t columns, int t, double decay) {
    m.resize(w.size()), v.resize(w.size());
    const double mu = options.momentum;
    if (rows > 0) {
      Matrix d(w.size());
      for (size_t i = 0; i < w.size(); ++i) {
        m[i] = mu * m[i] + (1 - mu) * g[i];
        d[i] = options.nesterov ? (1 - mu) * g[i] + mu * m[i] : m[i];
      }
      const Matrix x = newton_schulz(d, rows, columns, options.iterations);
      const double r = double(rows), c = double(columns),
                   scale = options.scale == MuonScale::spectral ? std::sqrt(std::max(1.0, r / c))
                                                                : 0.2 * std::sqrt(std::max(r, c));
      for (size_t i = 0; i < w.size(); ++i) w[i] -= options.lr * (scale * x[i] + decay * w[i]);
      return;
    }
    const double lr = options.lr * options.adamw_lr_scale;
    for (size_t i = 0; i < w.size(); ++i) {
      m[i] = options.beta1 * m[i] + (1 - options.beta1) * g[i];
      v[i] = options.beta2 * v[i] + (1 - options.beta2) * g[i] * g[i];
      const double m_hat = m[i] / (1 - std::pow(options.beta1, t)),
                   v_hat = v[i] / (1 - std::pow(options.beta2, t));
      w[i] = w[i] * (1 - lr * decay) - lr * m_hat / (std::sqrt(v_hat) + options.eps);
    }
  }
};

struct MuonParameter {
  const char* name;
  Shape shape;
  bool muon;
};
/// Wide, tall, square; three of one shape, one of them apart; rows with padding; matrices of a group; what
/// AdamW gets by its shape or its name.
const std::vector<MuonParameter> kMuonParameters{{"blocks.0.up.weight", {9, 5}, true},
                                                 {"blocks.0.up.bias", {9}, false},
                                                 {"blocks.0.down.weight", {5, 9}, true},
                                                 {"blocks.1.up.weight", {9, 5}, true},
                                                 {"blocks.1.norm.weight", {5}, false},
                                                 {"token.weight", {11, 5}, false},
                                                 {"blocks.2.square.weight", {6, 6}, true},
                                                 {"blocks.2.up.weight", {9, 5}, true},
                                                 {"groups.weight", {3, 4, 7}, true},
                                                 {"head.weight", {4, 6}, false},
                                                 {"row.weight", {1, 8}, false}};

std::vector<nn::NamedParameter> parameters_of(DType dtype, Device device) {
  std::vector<nn::NamedParameter> list;
  for (size_t i = 0; i < kMuonParameters.size(); ++i)
    list.push_back({kMuonParameters[i].name, new_parameter(i, kMuonParameters[i].shape, dtype, device)});
  return list;
}

void arrive_all(const std::vector<nn::NamedParameter>& list, uint64_t step) {
  for (size_t i = 0; i < list.size(); ++i)
    arrive(list[i].tensor,
           Tensor::from(numbers(1000 + 50 * step + i, list[i].tensor.count()), list[i].tensor.shape()));
}

TEST(Muon, FiveStepsInF64EqualTheReference) {
  for (const bool nesterov : {true, false})
    for (const MuonScale scale : {MuonScale::spectral, MuonScale::adamw}) {
      const MuonOptions options{
          .lr = 0.03, .nesterov = nesterov, .scale = scale, .weight_decay = 0.2, .adamw_lr_scale = 0.5};
      const std::vector<nn::NamedParameter> list = parameters_of(DType::f64, Device::cpu());
      Muon optimizer(list, options);
      std::vector<std::vector<MuonReference>> references;
      std::vector<Matrix> expected;
      for (size_t i = 0; i < list.size(); ++i) {
        EXPECT_STREQ(optimizer.rule_of(i), kMuonParameters[i].muon ? "muon" : "adamw")
            << kMuonParameters[i].name;
        const Shape& shape = kMuonParameters[i].shape;
        references.push_back(
            std::vector<MuonReference>(kMuonParameters[i].muon && shape.rank() == 3 ? size_t(shape[0]) : 1,
                                       MuonReference{options, {}, {}}));
        expected.push_back(list[i].tensor.to_vector<double>());
      }
      for (int t = 1; t <= 5; ++t) {
        arrive_all(list, uint64_t(t));
        optimizer.step(), optimizer.zero_grad();
        for (size_t i = 0; i < list.size(); ++i) {
          const Shape& shape = kMuonParameters[i].shape;
          const Matrix g = numbers(1000 + 50 * uint64_t(t) + i, shape.count());
          const size_t parts = references[i].size(), count = g.size() / parts;
          for (size_t part = 0; part < parts; ++part) {
            Matrix w(expected[i].begin() + long(part * count),
                     expected[i].begin() + long((part + 1) * count));
            const Matrix own(g.begin() + long(part * count), g.begin() + long((part + 1) * count));
            const size_t rows = kMuonParameters[i].muon ? size_t(shape[-2]) : 0,
                         columns = kMuonParameters[i].muon ? size_t(shape[-1]) : 0;
            references[i][part].step(w, own, rows, columns, t, decays(list[i]) ? options.weight_decay : 0);
            std::copy(w.begin(), w.end(), expected[i].begin() + long(part * count));
          }
        }
      }
      for (size_t i = 0; i < list.size(); ++i) {
        const Matrix got = list[i].tensor.to_vector<double>();
        // Roundings of 2^-53; the iteration multiplies small differences by 3.4445 in each of five turns, and
        // those of one step reach the next.
        for (size_t k = 0; k < got.size(); ++k)
          ASSERT_NEAR(got[k], expected[i][k], 1e-11) << kMuonParameters[i].name << " element " << k;
      }
    }
}

class MuonOn : public OnDevice {};
INSTANTIATE_TEST_SUITE_P(Device, MuonOn, testing::Values("cpu", "cuda"));

/// Singular values of a small matrix by one-sided Jacobi rotations.
std::vector<double> singular_values(Matrix a, size_t m, size_t n) {
  if (m < n) a = transposed(a, m, n), std::swap(m, n);
  for (int sweep = 0; sweep < 30; ++sweep)
    for (size_t p = 0; p < n; ++p)
      for (size_t q = p + 1; q < n; ++q) {
        double alpha = 0, beta = 0, gamma = 0;
        for (size_t i = 0; i < m; ++i) {
          alpha += a[i * n + p] * a[i * n + p], beta += a[i * n + q] * a[i * n + q];
          gamma += a[i * n + p] * a[i * n + q];
        }
        if (std::abs(gamma) <= 1e-15 * std::sqrt(alpha * beta)) continue;
        const double zeta = (beta - alpha) / (2 * gamma),
                     t = (zeta >= 0 ? 1 : -1) / (std::abs(zeta) + std::sqrt(1 + zeta * zeta)),
                     c = 1 / std::sqrt(1 + t * t), s = c * t;
        for (size_t i = 0; i < m; ++i) {
          const double left = a[i * n + p], right = a[i * n + q];
          a[i * n + p] = c * left - s * right, a[i * n + q] = s * left + c * right;
        }
      }
  std::vector<double> values(n);
  for (size_t j = 0; j < n; ++j) {
    for (size_t i = 0; i < m; ++i) values[j] += a[i * n + j] * a[i * n + j];
    values[j] = std::sqrt(values[j]);
  }
  return values;
}

TEST_P(MuonOn, UpdatesAreNearlyOrthogonal) {
  for (const Shape& shape : {Shape{24, 64}, Shape{64, 24}, Shape{32, 96}, Shape{17, 40}}) {
    // In bf16 as on a GPU, and in the dtype of the CPU.
    for (const std::optional<DType> compute : {std::optional<DType>(), std::optional(DType::bf16)}) {
      Tensor weight = Tensor::zeros(shape, DType::f32, device());
      nn::make_parameter(weight);
      Muon optimizer({{"up.weight", weight}},
                     {.lr = 1, .momentum = 0, .nesterov = false, .compute = compute});
      // Its singular values are within a factor of some 5 of each other: none is close to 0.
      arrive(weight, Tensor::from(numbers(3, shape.count()), shape));
      optimizer.step();
      const double scale = std::sqrt(std::max(1.0, double(shape[0]) / double(shape[1])));
      Matrix update = weight.detach().to_vector<double>();
      for (double& value : update) value /= -scale;
      for (const double value : singular_values(update, size_t(shape[0]), size_t(shape[1]))) {
        // Between the polynomial's local minimum, 0.6817 at 1.0501, and maximum, 1.2024 at 0.5545. bf16
        // rounds X to 2^-9 in each iteration.
        const double slack = compute || device().is_cuda() ? 0.02 : 1e-4;
        EXPECT_GT(value, 0.6817 - slack) << shape;
        EXPECT_LT(value, 1.2024 + slack) << shape;
      }
    }
  }
}

TEST_P(MuonOn, SubnormalMomentaGiveFiniteUpdates) {
  // What is left of a momentum 1,800 steps after its last gradient: 1 / its norm is above the largest f32.
  Tensor weight = Tensor::zeros({16, 40}, DType::f32, device());
  nn::make_parameter(weight);
  Muon optimizer({{"up.weight", weight}}, {.lr = 1, .momentum = 0, .nesterov = false});
  arrive(weight, Tensor::full({16, 40}, 1e-43, DType::f32, Device::cpu()));
  optimizer.step();
  for (const double value : weight.detach().to_vector<double>()) ASSERT_TRUE(std::isfinite(value)) << value;
}

TEST_P(MuonOn, MastersOf16BitWeightsFollowTheF64Optimizer) {
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
    const std::vector<nn::NamedParameter> list = parameters_of(dtype, device());
    std::vector<nn::NamedParameter> oracle;
    for (const auto& [name, tensor] : list) {
      Tensor exact = tensor.detach().to(Device::cpu()).to(DType::f64);
      nn::make_parameter(exact);
      oracle.push_back({name, exact});
    }
    const MuonOptions options{.lr = 0.01, .weight_decay = 0.1, .max_grad_norm = 1};
    Muon optimizer(list, options), reference(oracle, options);
    for (uint64_t t = 0; t < 3; ++t) {
      for (size_t i = 0; i < list.size(); ++i) {
        const Tensor gradient =
            Tensor::from(numbers(2000 + 50 * t + i, list[i].tensor.count()), list[i].tensor.shape())
                .to(dtype)
                .to(DType::f64);
        arrive(list[i].tensor, gradient), arrive(oracle[i].tensor, gradient);
      }
      optimizer.step(), optimizer.zero_grad();
      reference.step(), reference.zero_grad();
    }
    for (size_t i = 0; i < list.size(); ++i) {
      const Matrix got = list[i].tensor.detach().to_vector<double>(),
                   want = oracle[i].tensor.to_vector<double>();
      // Updates have elements below 0.01 * 1.5 (columns' norms are below 1.2). On a GPU X is bf16: 2^-8 of
      // that in each of five iterations, which multiply what came before by up to 3.4; three steps. A narrow
      // weight is rounded once more, and lies below 2.
      const double iterated = device().is_cpu() ? 1e-5 : 3 * 0.015 * 0.1,
                   tolerance = iterated + (dtype == DType::f32 ? 0 : 2 * epsilon(dtype));
      for (size_t k = 0; k < got.size(); ++k)
        ASSERT_NEAR(got[k], want[k], tolerance)
            << dtype << " " << kMuonParameters[i].name << " element " << k;
    }
  }
}

/// The norm of all gradients is the same number, whatever the rules, groups and kinds of state.
TEST_P(MuonOn, TheGradientNormIsThatOfOtherOptimizersToTheBit) {
  const auto norm = [&](auto&& make) {
    const std::vector<nn::NamedParameter> list = parameters_of(DType::f32, device());
    auto optimizer = make(list);
    arrive_all(list, 1);
    optimizer.step();
    return optimizer.grad_norm();
  };
  const double adamw = norm([](auto& list) { return AdamW(list); });
  EXPECT_EQ(norm([](auto& list) { return Muon(list); }), adamw);
  EXPECT_EQ(norm([](auto& list) { return Sgd(list); }), adamw);
  EXPECT_EQ(norm([](auto& list) {
              return Muon(list, {.groups = {{.contains = "blocks.1", .rule = "adamw"},
                                            {.contains = "token", .rule = "muon"}}});
            }),
            adamw);
}

/// A step that is skipped changes nothing, and the next one does.
TEST_P(MuonOn, ANonFiniteGradientChangesNothing) {
  const std::vector<nn::NamedParameter> list = parameters_of(DType::bf16, device());
  Muon optimizer(list, {.max_grad_norm = 1});
  const auto state = [&] {
    std::vector<Matrix> all;
    for (const auto& [name, tensor] : list) all.push_back(tensor.detach().to_vector<double>());
    for_each_field(optimizer, [&](const std::string& name, auto& leaf) {
      if constexpr (std::is_same_v<std::remove_cvref_t<decltype(leaf)>, Tensor>)
        if (name != "counts") all.push_back(leaf.template to_vector<double>());
    });
    return all;
  };
  arrive_all(list, 1);
  optimizer.step(), optimizer.zero_grad();
  const auto before = state();
  arrive_all(list, 2);
  grad(list[0].tensor).fill(std::nan(""));
  optimizer.step(), optimizer.zero_grad();
  EXPECT_EQ(state(), before);
  EXPECT_EQ(optimizer.skipped(), 1);
  arrive_all(list, 3);
  optimizer.step();
  EXPECT_NE(state(), before);
  for (const Matrix& part : state())
    for (const double value : part) ASSERT_TRUE(std::isfinite(value));
}

TEST_P(MuonOn, AReplayedGraphEqualsEagerStepsAndAllocatesNothing) {
  const auto run = [&](bool captured) {
    const std::vector<nn::NamedParameter> list = parameters_of(DType::f32, device());
    Muon optimizer(list, {.weight_decay = 0.1, .max_grad_norm = 1});
    Captured step(device(), [&] { optimizer.step(); });
    size_t calls = 0;
    for (uint64_t t = 0; t < 6; ++t) {
      optimizer.set_lr(0.1 / double(t + 1));
      arrive_all(list, t);
      if (t == 3) calls = device().allocator().stats().driver_calls;
      captured ? step() : optimizer.step();
      optimizer.zero_grad();
    }
    EXPECT_EQ(device().allocator().stats().driver_calls, calls);
    std::vector<std::vector<float>> weights;
    for (const auto& [name, tensor] : list) weights.push_back(tensor.detach().to_vector<float>());
    return weights;
  };
  EXPECT_EQ(run(true), run(false));
}

TEST(Muon, AGradientOfZeroLeavesOnlyDecay) {
  Tensor weight = Tensor::full({4, 6}, 1, DType::f64, Device::cpu());
  nn::make_parameter(weight);
  Muon optimizer({{"up.weight", weight}}, {.lr = 0.5, .weight_decay = 0.25});
  optimizer.complete_gradients();
  optimizer.step();
  for (const double value : weight.to_vector<double>()) EXPECT_EQ(value, 1 - 0.125);
}

TEST(Muon, StatesCoverTheParametersOfTheirRuleAlone) {
  const std::vector<nn::NamedParameter> list = parameters_of(DType::f32, Device::cpu());
  Muon optimizer(list);
  std::vector<std::string> names;
  for_each_field(optimizer, [&](const std::string& name, auto&) { names.push_back(name); });
  std::vector<std::string> expected{"lr", "counts"};
  for (const MuonParameter& c : kMuonParameters)
    if (c.muon) expected.push_back(std::string("momentum.") + c.name);
  for (const char* const state : {"m.", "v."})
    for (const MuonParameter& c : kMuonParameters)
      if (!c.muon) expected.push_back(state + std::string(c.name));
  EXPECT_EQ(names, expected);
}

TEST(Muon, RefusesWhatItCannotDo) {
  Tensor matrix = new_parameter(1, {3, 4}, DType::f32, Device::cpu()),
         vector = new_parameter(1, {3}, DType::f32, Device::cpu());
  const std::vector<nn::NamedParameter> list{{"a.weight", matrix}, {"a.bias", vector}};
  const auto says = [&](const MuonOptions& options) { return message_of([&] { Muon(list, options); }); };
  EXPECT_NE(says({.momentum = 1}).find("momentum = 1"), std::string::npos);
  EXPECT_NE(says({.iterations = 0}).find("iterations = 0"), std::string::npos);
  EXPECT_NE(says({.compute = DType::f64}).find("compute is f64"), std::string::npos);
  EXPECT_NE(says({.groups = {{.contains = "bias", .rule = "muon"}}}).find("a.bias"), std::string::npos);
  EXPECT_NE(says({.groups = {{.contains = "bias", .rule = "lion"}}}).find("\"lion\""), std::string::npos);
  EXPECT_NE(message_of([&] {
              Optimizer("mine", list, {}, {{muon_rule(), is_hidden_matrix}});
            }).find("a.bias f32[3]"),
            std::string::npos)
      << message_of([&] {
           Optimizer("mine", list, {}, {{muon_rule(), is_hidden_matrix}});
         });
  const std::shared_ptr<Rule> rule = sgd_rule();
  Optimizer first("first", list, {}, {{rule}});
  EXPECT_NE(message_of([&] { Optimizer("second", list, {}, {{rule}}); }).find("another optimizer"),
            std::string::npos);
  EXPECT_NE(message_of([&] { Optimizer("mine", list, {}, {}); }).find("0 rules"), std::string::npos);
}

}  // namespace
}  // namespace tessera::optim
