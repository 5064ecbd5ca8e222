#include "optim/sgd.h"

namespace tessera::optim {
namespace {

std::vector<const char*> states_of(const SgdOptions& options) {
  if (options.momentum == 0) return {};
  return {"v"};
}

}  // namespace

Sgd::Sgd(std::vector<nn::NamedParameter> parameters, const SgdOptions& options)
    : Optimizer("Sgd", std::move(parameters), states_of(options), options.lr, options.weight_decay,
                options.groups, options.loss_scale),
      options_(options) {
  check(options.momentum >= 0 && options.momentum < 1, "Sgd: momentum = ", options.momentum,
        " must be in [0, 1)");
  check(!options.nesterov || options.momentum > 0, "Sgd: nesterov needs a momentum above 0");
  check(options.weight_decay >= 0 && options.max_norm >= 0, "Sgd: weight_decay = ", options.weight_decay,
        " and max_norm = ", options.max_norm, " must not be negative");
}

void Sgd::step() {
  const PrepareOptions prepare{.max_norm = options_.max_norm};
  if (options_.momentum == 0)
    Optimizer::step(SgdRule{}, prepare);
  else
    Optimizer::step(MomentumRule{options_.momentum, options_.nesterov}, prepare);
}

}  // namespace tessera::optim
