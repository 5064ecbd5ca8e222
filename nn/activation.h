#pragma once

#include "nn/module.h"
#include "ops/activation/activation.h"

namespace tessera::nn {

/// Activations as layers, for Sequential. See ops/activation/activation.h for the formulas.
template <ops::Activation kActivation>
struct ActivationLayer {
  Tensor operator()(const Tensor& x, Site site = Site::here()) const {
    const LayerCall call(*this, site);
    return ops::activation(x, kActivation);
  }
  void fields(auto&&) {}
  LayerName layer_name;  // for messages
};

using Relu = ActivationLayer<ops::Activation::relu>;
using ReluSquared = ActivationLayer<ops::Activation::relu_squared>;
using Silu = ActivationLayer<ops::Activation::silu>;
using Gelu = ActivationLayer<ops::Activation::gelu>;
using GeluTanh = ActivationLayer<ops::Activation::gelu_tanh>;

}  // namespace tessera::nn
