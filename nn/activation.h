#pragma once

#include "nn/module.h"
#include "ops/activation/activation.h"

namespace tessera::nn {

/// Activations as layers, for Sequential. See ops/activation/activation.h for the formulas.
template <ops::Activation kActivation>
struct ActivationLayer {
  Tensor operator()(const Tensor& x) const { return ops::activation(x, kActivation); }
  void fields(auto&&) {}
};

using Relu = ActivationLayer<ops::Activation::relu>;
using ReluSquared = ActivationLayer<ops::Activation::relu_squared>;
using Silu = ActivationLayer<ops::Activation::silu>;
using Gelu = ActivationLayer<ops::Activation::gelu>;
using GeluTanh = ActivationLayer<ops::Activation::gelu_tanh>;

}  // namespace tessera::nn
