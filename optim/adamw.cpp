#include "optim/adamw.h"

namespace tessera::optim {

AdamW::AdamW(std::vector<nn::NamedParameter> parameters, const AdamWOptions& options)
    : Optimizer("AdamW", std::move(parameters), {"m", "v"}, options.lr, options.weight_decay, options.groups,
                options.loss_scale),
      options_(options) {
  check(options.beta1 >= 0 && options.beta1 < 1 && options.beta2 >= 0 && options.beta2 < 1,
        "AdamW: beta1 = ", options.beta1, " and beta2 = ", options.beta2, " must be in [0, 1)");
  check(options.eps >= 0 && options.weight_decay >= 0 && options.max_norm >= 0, "AdamW: eps = ", options.eps,
        ", weight_decay = ", options.weight_decay, " and max_norm = ", options.max_norm,
        " must not be negative");
}

void AdamW::step() {
  Optimizer::step(AdamWRule{options_.beta1, options_.beta2, options_.eps},
                  {.max_norm = options_.max_norm, .beta1 = options_.beta1, .beta2 = options_.beta2});
}

}  // namespace tessera::optim
