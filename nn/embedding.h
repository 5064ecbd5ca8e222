#pragma once

#include "nn/init.h"
#include "nn/module.h"

namespace tessera::nn {

struct EmbeddingOptions {
  double deviation = 1;  // of the normal initial values; PyTorch's default; 0: zeros, nothing is drawn
  DType dtype = DType::f32;
};

/// Row lookup: indices [...] (i64 or i32) -> [..., width].
struct Embedding {
  static constexpr const char* kKind = "Embedding";

  Embedding(int64_t count, int64_t width, const Rng& rng, Device device = Device::cpu(),
            EmbeddingOptions options = {});
  Embedding(int64_t count, int64_t width, const Rng& rng, EmbeddingOptions options)
      : Embedding(count, width, rng, Device::cpu(), options) {}
  Tensor operator()(const Tensor& indices, Site site = Site::here()) const;
  void fields(auto&& visit) { visit("weight", weight); }
  LayerName layer_name;  // for messages

  Tensor weight;  // [count, width]
};

}  // namespace tessera::nn
