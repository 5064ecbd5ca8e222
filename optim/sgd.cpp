#include "optim/sgd.h"

#include "optim/bundled.h"
#include "optim/options_internal.h"

namespace tessera::optim {

std::shared_ptr<Rule> sgd_rule(double momentum, bool nesterov) {
  check(momentum >= 0 && momentum < 1, "Sgd: momentum = ", momentum, " must be in [0, 1)");
  check(!nesterov || momentum > 0, "Sgd: nesterov needs a momentum above 0");
  if (momentum == 0)
    return std::make_shared<Elementwise<SgdRule>>("sgd", SgdRule{}, std::vector<const char*>{});
  return std::make_shared<Elementwise<MomentumRule>>("sgd", MomentumRule{momentum, nesterov},
                                                     std::vector<const char*>{"v"});
}

Sgd::Sgd(std::vector<nn::NamedParameter> parameters, const SgdOptions& options)
    : Optimizer("Sgd", std::move(parameters), shared_options(options),
                {{sgd_rule(options.momentum, options.nesterov)}}) {}

Sgd Sgd::from(std::vector<nn::NamedParameter> parameters, const BundledOptions& options) {
  SgdOptions own;
  copy_shared_options(own, options);
  return Sgd(std::move(parameters), own);
}

}  // namespace tessera::optim
