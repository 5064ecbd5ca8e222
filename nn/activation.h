#pragma once

#include "nn/module.h"
#include "ops/activation/activation.h"
#include "ops/pointwise/pointwise.h"

namespace tessera::nn {

/// Activations as layers, for Sequential. See ops/activation/activation.h and ops/pointwise/pointwise.h for
/// the formulas.
template <ops::Activation kActivation>
struct ActivationLayer {
  Tensor operator()(const Tensor& x, Site site = Site::here()) const {
    const LayerCall call(*this, site);
    return ops::activation(x, kActivation);
  }
  void fields(auto&&) {}
  LayerName layer_name;  // for messages
};

/// The same of an operator of one tensor.
template <Tensor (*kOperator)(const Tensor& x, Site site)>
struct PointwiseLayer {
  Tensor operator()(const Tensor& x, Site site = Site::here()) const {
    const LayerCall call(*this, site);
    return kOperator(x, site);
  }
  void fields(auto&&) {}
  LayerName layer_name;  // for messages
};

using Relu = ActivationLayer<ops::Activation::relu>;
using ReluSquared = ActivationLayer<ops::Activation::relu_squared>;
using Silu = ActivationLayer<ops::Activation::silu>;
using Gelu = ActivationLayer<ops::Activation::gelu>;
using GeluTanh = ActivationLayer<ops::Activation::gelu_tanh>;
using Tanh = PointwiseLayer<ops::tanh>;
using Sigmoid = PointwiseLayer<ops::sigmoid>;

}  // namespace tessera::nn
