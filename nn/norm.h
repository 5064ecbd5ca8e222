#pragma once

#include "nn/dropout.h"
#include "ops/norm/norm.h"

namespace tessera::nn {

struct LayerNormOptions {
  double eps = 1e-5;
  bool weight = true;
  bool bias = true;
  DType dtype = DType::f32;
};

/// y = (x - mean) / sqrt(variance + eps) weight + bias over the last dimension (Ba, Kiros, Hinton,
/// arXiv:1607.06450). The weight starts as ones, the bias as zeros.
struct LayerNorm {
  static constexpr const char* kKind = "LayerNorm";

  explicit LayerNorm(int64_t width, Device device = Device::cpu(), LayerNormOptions options = {});
  LayerNorm(int64_t width, LayerNormOptions options) : LayerNorm(width, Device::cpu(), options) {}
  Tensor operator()(const Tensor& x, Site site = Site::here()) const;
  /// sum = x + residual and y = the norm of sum, in one pass (ops::add_layernorm); with `dropout`, sum = x +
  /// dropout(residual).
  ops::AddNorm add(const Tensor& x, const Tensor& residual, const Dropout* dropout = nullptr,
                   Site site = Site::here()) const;
  void fields(auto&& visit) { visit("weight", weight), visit("bias", bias); }
  LayerName layer_name;  // for messages

  Tensor weight, bias;  // [width], each may be undefined
  double eps;
};

struct RmsNormOptions {
  double eps = 1e-6;
  bool weight = true;
  DType dtype = DType::f32;
};

/// y = x / sqrt(mean(x^2) + eps) weight over the last dimension (Zhang, Sennrich, arXiv:1910.07467).
struct RmsNorm {
  static constexpr const char* kKind = "RmsNorm";

  explicit RmsNorm(int64_t width, Device device = Device::cpu(), RmsNormOptions options = {});
  RmsNorm(int64_t width, RmsNormOptions options) : RmsNorm(width, Device::cpu(), options) {}
  Tensor operator()(const Tensor& x, Site site = Site::here()) const;
  /// sum = x + residual and y = the norm of sum, in one pass (ops::add_rmsnorm); with `dropout`, sum = x +
  /// dropout(residual).
  ops::AddNorm add(const Tensor& x, const Tensor& residual, const Dropout* dropout = nullptr,
                   Site site = Site::here()) const;
  void fields(auto&& visit) { visit("weight", weight); }
  LayerName layer_name;  // for messages

  Tensor weight;  // [width], or undefined
  double eps;
};

}  // namespace tessera::nn
