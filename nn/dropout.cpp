#include "nn/dropout.h"

#include "ops/dropout/dropout.h"

namespace tessera::nn {

Dropout::Dropout(double p, const Rng& rng) : p(p), rng(rng) {
  check(p >= 0 && p < 1, "nn::Dropout: p = ", p, " must be in [0, 1)");
}

Tensor Dropout::operator()(const Tensor& x, Site site) const {
  const LayerCall call(*this, site);
  return drops() ? ops::dropout(x, p, rng) : x;
}

}  // namespace tessera::nn
