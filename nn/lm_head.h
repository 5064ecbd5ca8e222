#pragma once

#include "nn/embedding.h"
#include "nn/linear.h"

namespace tessera::nn {

struct LmHeadOptions {
  bool tied = false;  // its weight is the token embedding's
  bool bias = false;
  DType dtype = DType::f32;
  Init init = Init::fan_in;
};

/// The output layer of a language model: logits = x weight^T + bias, with a weight [V, d] of its own or,
/// tied, that of the token embedding, which calls take. Its parameters have the names of a Linear in its
/// place.
struct LmHead {
  static constexpr const char* kKind = "LmHead";

  LmHead(int64_t d, int64_t vocabulary, const Rng& rng, Device device = Device::cpu(),
         LmHeadOptions options = {});
  LmHead(int64_t d, int64_t vocabulary, const Rng& rng, LmHeadOptions options)
      : LmHead(d, vocabulary, rng, Device::cpu(), options) {}
  /// Whether its weight is the token embedding's: a layer of factors or of compressed parts has its own.
  bool tied() const;
  /// [N, d] -> logits [N, V].
  Tensor operator()(const Tensor& x, const Embedding& token, Site site = Site::here()) const;
  /// Mean cross-entropy of x [N, d] and targets [N], -100 where none is to be predicted. Dense and not
  /// observed, it is ops::linear_cross_entropy, which never makes the logits as a whole; else the logits are
  /// one tensor.
  Tensor loss(const Tensor& x, const Tensor& targets, const Embedding& token, Site site = Site::here()) const;
  void fields(auto&& visit) { visit("", out); }
  LayerName layer_name;  // for messages

  Linear out;
};

}  // namespace tessera::nn
