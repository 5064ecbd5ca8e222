#include "optim/adamw.h"

#include "optim/bundled.h"
#include "optim/options_internal.h"

namespace tessera::optim {

namespace {

/// AdamW whose moments begin again after every so many steps.
class RestartedAdamW : public Rule {
 public:
  RestartedAdamW(const AdamWRule& formula, int64_t every) : formula_(formula), every_(every) {}
  const char* name() const override { return "adamw"; }
  Betas betas() const override { return {formula_.beta1, formula_.beta2}; }
  bool takes_short_states() const override { return true; }
  void begin() override {
    m_ = arena("m"), v_ = arena("v");
    reset_ = restarts_every("adamw.reset_in", every_);
  }
  void step() override {
    apply(formula_, {m_, v_});
    restart_if_due(reset_, {m_, v_});
  }

 private:
  AdamWRule formula_;
  int64_t every_;
  Tensor m_, v_;
  size_t reset_ = 0;
};

}  // namespace

std::shared_ptr<Rule> adamw_rule(double beta1, double beta2, double eps, int64_t momentum_reset) {
  check(beta1 >= 0 && beta1 < 1 && beta2 >= 0 && beta2 < 1, "AdamW: beta1 = ", beta1, " and beta2 = ", beta2,
        " must be in [0, 1)");
  check(eps >= 0, "AdamW: eps = ", eps, " must not be negative");
  check(momentum_reset >= 0, "AdamW: momentum_reset = ", momentum_reset, " must not be negative");
  if (momentum_reset > 0)
    return std::make_shared<RestartedAdamW>(AdamWRule{beta1, beta2, eps}, momentum_reset);
  return std::make_shared<Elementwise<AdamWRule>>("adamw", AdamWRule{beta1, beta2, eps},
                                                  std::vector<const char*>{"m", "v"}, Betas{beta1, beta2});
}

AdamW::AdamW(std::vector<nn::NamedParameter> parameters, const AdamWOptions& options)
    : Optimizer("AdamW", std::move(parameters), shared_options(options),
                {{adamw_rule(options.beta1, options.beta2, options.eps, options.momentum_reset)}}) {}

AdamW AdamW::from(std::vector<nn::NamedParameter> parameters, const BundledOptions& options) {
  AdamWOptions own;
  copy_shared_options(own, options);
  return AdamW(std::move(parameters), own);
}

}  // namespace tessera::optim
