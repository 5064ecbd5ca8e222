#include "nn/embedding.h"

#include "ops/embedding/embedding.h"

namespace tessera::nn {

Embedding::Embedding(int64_t count, int64_t width, const Rng& rng, Device device, EmbeddingOptions options)
    : weight(Tensor::empty({count, width}, options.dtype, device)) {
  if (options.deviation > 0)
    init::normal(weight, rng, 0, options.deviation);
  else
    init::zeros(weight);
  make_parameter(weight);
}

Tensor Embedding::operator()(const Tensor& indices, Site site) const {
  const LayerCall call(*this, site);
  return ops::embedding(weight, indices);
}

}  // namespace tessera::nn
