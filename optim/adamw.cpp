#include "optim/adamw.h"

#include "optim/bundled.h"

namespace tessera::optim {

std::shared_ptr<Rule> adamw_rule(double beta1, double beta2, double eps) {
  check(beta1 >= 0 && beta1 < 1 && beta2 >= 0 && beta2 < 1, "AdamW: beta1 = ", beta1, " and beta2 = ", beta2,
        " must be in [0, 1)");
  check(eps >= 0, "AdamW: eps = ", eps, " must not be negative");
  return std::make_shared<Elementwise<AdamWRule>>("adamw", AdamWRule{beta1, beta2, eps},
                                                  std::vector<const char*>{"m", "v"}, Betas{beta1, beta2});
}

AdamW::AdamW(std::vector<nn::NamedParameter> parameters, const AdamWOptions& options)
    : Optimizer("AdamW", std::move(parameters),
                {.lr = options.lr,
                 .weight_decay = options.weight_decay,
                 .max_norm = options.max_norm,
                 .groups = options.groups,
                 .loss_scale = options.loss_scale},
                {{adamw_rule(options.beta1, options.beta2, options.eps)}}) {}

AdamW AdamW::from(std::vector<nn::NamedParameter> parameters, const BundledOptions& options) {
  return AdamW(std::move(parameters), {.lr = options.lr,
                                       .beta1 = options.beta1,
                                       .beta2 = options.beta2,
                                       .weight_decay = options.weight_decay,
                                       .max_norm = options.max_norm,
                                       .groups = options.groups,
                                       .loss_scale = options.loss_scale});
}

}  // namespace tessera::optim
