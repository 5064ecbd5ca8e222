#pragma once

#include "nn/init.h"
#include "nn/module.h"
#include "ops/activation/activation.h"

namespace tessera::nn {

struct LinearOptions {
  bool bias = true;
  DType dtype = DType::f32;
  Init init = Init::fan_in;
};

/// y = x weight^T + bias over the last dimension: [..., in] -> [..., out]. The bias starts as
/// U(-1/sqrt(in), 1/sqrt(in)), as PyTorch's, with Init::fan_in, else as zeros. A residual [..., out] is
/// added.
struct Linear {
  static constexpr const char* kKind = "Linear";

  Linear(int64_t in, int64_t out, Rng& rng, Device device = Device::cpu(), LinearOptions options = {});
  Tensor operator()(const Tensor& x, const Tensor& residual = {}) const;
  double flops(int64_t tokens) const { return 2.0 * double(tokens) * double(weight.count()); }
  void fields(auto&& visit) { visit("weight", weight), visit("bias", bias); }

  Tensor weight;  // [out, in]
  Tensor bias;    // [out], or undefined
};

struct GroupedLinearOptions {
  bool shared = true;  // one input for all groups; false: group k takes x[..., k, :]
  bool bias = true;
  DType dtype = DType::f32;
  Init init = Init::fan_in;
};

/// K linear layers in one: y[..., k, :] = x weight_k^T + bias_k. Shared: [..., in] -> [..., K, out]; else
/// [..., K, in] -> [..., K, out].
struct GroupedLinear {
  static constexpr const char* kKind = "GroupedLinear";

  GroupedLinear(int64_t groups, int64_t in, int64_t out, Rng& rng, Device device = Device::cpu(),
                GroupedLinearOptions options = {});
  Tensor operator()(const Tensor& x) const;
  double flops(int64_t tokens) const { return 2.0 * double(tokens) * double(weight.count()); }
  void fields(auto&& visit) { visit("weight", weight), visit("bias", bias); }

  Tensor weight;  // [K, out, in]
  Tensor bias;    // [K, out], or undefined
  bool shared;    // part of the architecture, not of the state
};

struct MlpOptions {
  ops::Activation activation = ops::Activation::silu;
  int64_t out = 0;  // 0: as wide as the input
  bool bias = true;
  DType dtype = DType::f32;
  Init init = Init::fan_in;
};

/// y = down(activation(up(x))) + residual: [..., in] -> [..., out].
struct Mlp {
  static constexpr const char* kKind = "Mlp";

  Mlp(int64_t in, int64_t hidden, Rng& rng, Device device = Device::cpu(), MlpOptions options = {});
  Tensor operator()(const Tensor& x, const Tensor& residual = {}) const;
  void fields(auto&& visit) { visit("up", up), visit("down", down); }

  Linear up, down;
  ops::Activation activation;
};

}  // namespace tessera::nn
