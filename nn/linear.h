#pragma once

#include "nn/form.h"
#include "nn/init.h"

namespace tessera::nn {

struct LinearOptions {
  bool bias = true;
  DType dtype = DType::f32;
  Init init = Init::fan_in;
  bool tied = false;  // no weight of its own: see Linear::with
};

/// y = x weight^T + bias over the last dimension: [..., in] -> [..., out], its GEMM in the layer's form. The
/// bias starts as U(-1/sqrt(in), 1/sqrt(in)), as PyTorch's, with Init::fan_in, else as zeros. A residual
/// [..., out] is added.
struct Linear {
  static constexpr const char* kKind = "Linear";

  Linear(int64_t in, int64_t out, const Rng& rng, Device device = Device::cpu(), LinearOptions options = {});
  Linear(int64_t in, int64_t out, const Rng& rng, LinearOptions options)
      : Linear(in, out, rng, Device::cpu(), options) {}
  Tensor operator()(const Tensor& x, const Tensor& residual = {}, Site site = Site::here()) const;
  /// The same with another tensor's elements as the weight [out, in]: how a tied layer is called.
  Tensor with(const Tensor& shared_weight, const Tensor& x, const Tensor& residual = {},
              Site site = Site::here()) const;
  double flops(int64_t tokens) const { return 2.0 * double(tokens) * multiply_adds(form, in, out); }
  void fields(auto&& visit) { visit("weight", weight), visit("bias", bias), visit("form", form); }
  LayerName layer_name;  // for messages

  Tensor weight;  // [out, in], or undefined if tied, compressed or made of factors
  Tensor bias;    // [out], or undefined
  Form form;
  int64_t in, out;  // part of the architecture, not of the state
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

  GroupedLinear(int64_t groups, int64_t in, int64_t out, const Rng& rng, Device device = Device::cpu(),
                GroupedLinearOptions options = {});
  GroupedLinear(int64_t groups, int64_t in, int64_t out, const Rng& rng, GroupedLinearOptions options)
      : GroupedLinear(groups, in, out, rng, Device::cpu(), options) {}
  Tensor operator()(const Tensor& x, Site site = Site::here()) const;
  double flops(int64_t tokens) const { return 2.0 * double(tokens) * double(weight.count()); }
  void fields(auto&& visit) { visit("weight", weight), visit("bias", bias), visit("form", form); }
  LayerName layer_name;  // for messages

  Tensor weight;  // [K, out, in]
  Tensor bias;    // [K, out], or undefined
  Form form;
  bool shared;  // part of the architecture, not of the state
};

}  // namespace tessera::nn
