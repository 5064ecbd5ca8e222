#include "nn/lm_head.h"

#include "nn/low_rank.h"
#include "nn/observe.h"
#include "ops/cross_entropy/cross_entropy.h"
#include "ops/linear_cross_entropy/linear_cross_entropy.h"

namespace tessera::nn {

LmHead::LmHead(int64_t d, int64_t vocabulary, const Rng& rng, Device device, LmHeadOptions options)
    : out(d, vocabulary, rng, device,
          {.bias = options.bias, .dtype = options.dtype, .init = options.init, .tied = options.tied}) {}

bool LmHead::tied() const {
  return !out.weight.defined() && !factors_of(out.form) && !std::holds_alternative<Compressed>(out.form);
}

Tensor LmHead::operator()(const Tensor& x, const Embedding& token, Site site) const {
  const LayerCall call(*this, site);
  return out.with(tied() ? token.weight : out.weight, x);
}

Tensor LmHead::loss(const Tensor& x, const Tensor& targets, const Embedding& token, Site site) const {
  const LayerCall call(*this, site);
  if (run_separately(out)) return ops::cross_entropy((*this)(x, token), targets);
  return ops::linear_cross_entropy(x, tied() ? token.weight : out.weight, targets, out.bias);
}

}  // namespace tessera::nn
