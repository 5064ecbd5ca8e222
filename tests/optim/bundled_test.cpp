#include "optim/bundled.h"

#include <gtest/gtest.h>

#include "gradients.h"

/// Optimizers made by their names are those that programs make, option by option.

namespace tessera::optim {
namespace {

const Device kCpu = Device::cpu();

/// The factors of a hidden weight, a hidden matrix, an embedding and a norm; the last is in a group of its
/// own.
std::vector<nn::NamedParameter> bundled_parameters() {
  return {{"blocks.0.up.form.a", new_parameter(1, {2, 6}, DType::f64, kCpu)},
          {"blocks.0.up.form.b", new_parameter(2, {7, 2}, DType::f64, kCpu)},
          {"blocks.0.down.weight", new_parameter(3, {6, 5}, DType::f64, kCpu)},
          {"token.weight", new_parameter(4, {9, 6}, DType::f64, kCpu)},
          {"norm.weight", new_parameter(5, {6}, DType::f64, kCpu)}};
}

/// No value is a default, so that one that is lost changes the weights.
BundledOptions unusual_options() {
  return {.lr = 0.03,
          .weight_decay = 0.2,
          .max_grad_norm = 0.7,
          .momentum = 0.8,
          .beta1 = 0.85,
          .beta2 = 0.93,
          .momentum_reset = 3,
          .structure = {.matrices = {{"blocks.0.down.weight", {4, 2}}},
                        .pairs = {{"blocks.0.up.form.a", "blocks.0.up.form.b", {7}}}},
          .galore = {.rank = 2, .every = 2, .scale = 0.4},
          .loro = {.every = 2, .lr_scale = 0.6},
          .groups = {{.contains = "norm", .lr_scale = 0.5}},
          .loss_scale = LossScale{.initial = 4}};
}

std::vector<double> weights_after_steps(
    const std::function<Optimizer(std::vector<nn::NamedParameter>)>& make) {
  const std::vector<nn::NamedParameter> parameters = bundled_parameters();
  Optimizer optimizer = make(parameters);
  for (int step = 0; step < 5; ++step) {
    for (size_t i = 0; i < parameters.size(); ++i)
      arrive(parameters[i].tensor, gradient_of(i, step, parameters[i].tensor.shape()),
             optimizer.loss_scale());
    optimizer.step();
    optimizer.zero_grad();
  }
  std::vector<double> weights;
  for (const nn::NamedParameter& parameter : parameters)
    for (const double value : parameter.tensor.detach().to_vector<double>()) weights.push_back(value);
  return weights;
}

TEST(BundledOptimizers, HaveTheOptionsOfTheirOwnKind) {
  const BundledOptions o = unusual_options();
  const auto expect_equal = [&](const char* name, const auto& options, const auto& make) {
    EXPECT_EQ(weights_after_steps([&](auto parameters) { return make_optimizer(name, parameters, o); }),
              weights_after_steps([&](auto parameters) { return make(parameters, options); }))
        << name;
  };
  const auto made_by = []<class T>(std::type_identity<T>) {
    return [](std::vector<nn::NamedParameter> parameters, const auto& options) {
      return Optimizer(T(std::move(parameters), options));
    };
  };
  expect_equal("adamw",
               AdamWOptions{.lr = 0.03,
                            .beta1 = 0.85,
                            .beta2 = 0.93,
                            .weight_decay = 0.2,
                            .max_grad_norm = 0.7,
                            .momentum_reset = 3,
                            .groups = o.groups,
                            .loss_scale = o.loss_scale},
               made_by(std::type_identity<AdamW>()));
  expect_equal("sgd",
               SgdOptions{.lr = 0.03,
                          .momentum = 0.8,
                          .weight_decay = 0.2,
                          .max_grad_norm = 0.7,
                          .groups = o.groups,
                          .loss_scale = o.loss_scale},
               made_by(std::type_identity<Sgd>()));
  expect_equal("muon",
               MuonOptions{.lr = 0.03,
                           .momentum = 0.8,
                           .scale = MuonScale::adamw,
                           .weight_decay = 0.2,
                           .max_grad_norm = 0.7,
                           .beta1 = 0.85,
                           .beta2 = 0.93,
                           .groups = o.groups,
                           .loss_scale = o.loss_scale},
               made_by(std::type_identity<Muon>()));
  expect_equal("galore",
               GaloreOptions{.lr = 0.03,
                             .rank = 2,
                             .every = 2,
                             .scale = 0.4,
                             .beta1 = 0.85,
                             .beta2 = 0.93,
                             .weight_decay = 0.2,
                             .max_grad_norm = 0.7,
                             .momentum_reset = 3,
                             .matrices = o.structure.matrices,
                             .groups = o.groups,
                             .loss_scale = o.loss_scale},
               made_by(std::type_identity<Galore>()));
  expect_equal("loro",
               LoroOptions{.lr = 0.03,
                           .every = 2,
                           .lr_scale = 0.6,
                           .momentum_reset = 3,
                           .beta1 = 0.85,
                           .beta2 = 0.93,
                           .weight_decay = 0.2,
                           .max_grad_norm = 0.7,
                           .pairs = o.structure.pairs,
                           .groups = o.groups,
                           .loss_scale = o.loss_scale},
               made_by(std::type_identity<Loro>()));
}

/// Options of elementwise rules alone.
TEST(BundledOptimizers, HaveTheStatesThatTheirOptionsSay) {
  for (const char* const name : {"adamw", "sgd"}) {
    const Tensor weight = new_parameter(1, {8, 8}, DType::f32, kCpu);
    const Optimizer made =
        make_optimizer(name, {{"weight", weight}},
                       {.missing = MissingGrad::skip, .states = DType::bf16, .rounding_seed = 5});
    EXPECT_EQ(made.states(), DType::bf16) << name;
    EXPECT_EQ(made.missing(), MissingGrad::skip) << name;
    const Tensor other = new_parameter(1, {8, 8}, DType::f32, kCpu);
    EXPECT_EQ(
        make_optimizer(name, {{"weight", other}}, {.sharding = {.part = 1, .parts = 2}}).sharding().part, 1)
        << name;
  }
}

}  // namespace
}  // namespace tessera::optim
