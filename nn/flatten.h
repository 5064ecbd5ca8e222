#pragma once

#include "nn/module.h"
#include "ops/shape/shape.h"

namespace tessera::nn {

/// All dimensions but the first as one: [B, ...] -> [B, product of the others], as images become the rows of
/// a Linear. Throws for rank 0.
struct Flatten {
  Tensor operator()(const Tensor& x, Site site = Site::here()) const {
    const LayerCall call(*this, site);
    check(x.rank() > 0, "nn::Flatten: ", describe(x), " has no first dimension");
    int64_t width = 1;
    for (int dim = 1; dim < x.rank(); ++dim) width *= x.size(dim);
    return ops::reshape(x, {x.size(0), width});
  }
  void fields(auto&&) {}
  LayerName layer_name;  // for messages
};

}  // namespace tessera::nn
