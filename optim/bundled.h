#pragma once

#include <tuple>

#include "optim/adamw.h"
#include "optim/galore.h"
#include "optim/loro.h"
#include "optim/muon.h"
#include "optim/sgd.h"

/// The bundled optimizers: a new one is included above and listed below.

namespace tessera::optim {

using Bundled = std::tuple<AdamW, Muon, Sgd, Galore, Loro>;

/// Facts about a model that optimizers of matrices need beyond its parameters.
struct ModelStructure {
  MatrixRows matrices = {};             // Galore: parameters that are several matrices
  std::vector<FactorNames> pairs = {};  // Loro: parameters that are the factors of one weight
};

/// Options for making a bundled optimizer by name; each optimizer reads its own.
struct BundledOptions {
  double lr = 1e-3, weight_decay = 0, max_grad_norm = 0;
  double momentum = 0.95;             // Sgd, Muon
  double beta1 = 0.9, beta2 = 0.999;  // AdamW, and Muon's parameters that AdamW updates
  int64_t momentum_reset = 0;         // AdamW, Galore, Loro
  ModelStructure structure = {};
  GaloreOptions galore = {};  // what only it has
  LoroOptions loro = {};
  std::vector<Group> groups = {};
  std::optional<LossScale> loss_scale = {};
  MissingGrad missing = MissingGrad::zero;  // skip: AdamW, Sgd
  DType states = DType::f32;                // bf16: AdamW, Sgd
  uint64_t rounding_seed = 0;
  Sharding sharding = {};  // AdamW, Sgd
};

/// "adamw", "muon", "sgd", "galore", "loro".
std::vector<std::string> optimizer_names();
/// Throws if the name is unknown.
Optimizer make_optimizer(const std::string& name, std::vector<nn::NamedParameter> parameters,
                         const BundledOptions& options);

}  // namespace tessera::optim
