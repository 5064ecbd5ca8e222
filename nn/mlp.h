#pragma once

#include "nn/linear.h"
#include "ops/activation/activation.h"

namespace tessera::nn {

struct MlpOptions {
  ops::Activation activation = ops::Activation::silu;
  int64_t out = 0;     // 0: as wide as the input
  bool gated = false;  // the activation of one half of the hidden features multiplies the other half
  bool bias = true;
  DType dtype = DType::f32;
  Init init = Init::fan_in;
};

/// A feed-forward network [..., in] -> [..., out]:
///   y = down(activation(up(x))) + residual
/// or gated (Shazeer, arXiv:2002.05202; with SiLU it is SwiGLU), where the first half of up's rows is the
/// gate:
///   y = down(activation(gate(x)) up(x)) + residual
/// While up and down are dense (or carry the same slice) and not observed, it is ops::mlp, or, gated, with
/// SiLU and without biases, ops::linear_swiglu and ops::linear; an up that is compressed in two parts, gate
/// and up, is then ops::sparse_linear_swiglu. Up and down that carry the same slice choose their rows
/// together, once, by the gradient that arrives at down. Sparse24 is a form of both layers of a network
/// without a gate: ops::mlp_sparse24 while a tape records it, else as if they were dense; two LowRank layers
/// may carry it, and that operator is then between their outer factors. Within a HiddenL1 scope
/// (nn/hidden_l1.h) dense layers without a gate are that operator, too.
struct Mlp {
  static constexpr const char* kKind = "Mlp";

  Mlp(int64_t in, int64_t hidden, const Rng& rng, Device device = Device::cpu(), MlpOptions options = {});
  Mlp(int64_t in, int64_t hidden, const Rng& rng, MlpOptions options)
      : Mlp(in, hidden, rng, Device::cpu(), options) {}
  Tensor operator()(const Tensor& x, const Tensor& residual = {}, Site site = Site::here()) const;
  void fields(auto&& visit) { visit("up", up), visit("down", down); }
  LayerName layer_name;  // for messages

  Linear up, down;  // gated: up has 2 hidden rows, the gate's first
  ops::Activation activation;
  bool gated;

 private:
  Tensor hidden(const Tensor& x) const;
  Tensor sparse24(const Tensor& x, const Tensor& residual, const Sparse24& form) const;
  Tensor with_l1(const Tensor& x, const Tensor& residual) const;
};

struct GroupedMlpOptions {
  ops::Activation activation = ops::Activation::silu;
  bool bias = true;
  DType dtype = DType::f32;
  Init init = Init::fan_in;
};

/// K feed-forward networks over one input, the heads of a mixture model: y[..., k, :] =
/// down_k(activation(up_k(x))): [..., in] -> [..., K, out]. While up and down are dense, have no biases and
/// are not observed, it is ops::grouped_mlp, which never stores the hidden rows.
struct GroupedMlp {
  static constexpr const char* kKind = "GroupedMlp";

  GroupedMlp(int64_t groups, int64_t in, int64_t hidden, int64_t out, const Rng& rng,
             Device device = Device::cpu(), GroupedMlpOptions options = {});
  GroupedMlp(int64_t groups, int64_t in, int64_t hidden, int64_t out, const Rng& rng,
             GroupedMlpOptions options)
      : GroupedMlp(groups, in, hidden, out, rng, Device::cpu(), options) {}
  Tensor operator()(const Tensor& x, Site site = Site::here()) const;
  void fields(auto&& visit) { visit("up", up), visit("down", down); }
  LayerName layer_name;  // for messages

  GroupedLinear up, down;
  ops::Activation activation;
};

}  // namespace tessera::nn
