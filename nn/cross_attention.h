#pragma once

#include "nn/linear.h"

namespace tessera::nn {

struct CrossAttentionOptions {
  int64_t heads = 1;
  bool bias = true;
  DType dtype = DType::f32;
};

/// out(attention(q, k, v)) with q from some tokens and k and v, from one projection, of others; no mask.
/// Tokens are token-major, [T, B, d]: a prefix or suffix of them is a plain range of the rows.
struct CrossAttention {
  static constexpr const char* kKind = "CrossAttention";

  CrossAttention(int64_t d, const CrossAttentionOptions& options, Rng& rng, Device device);
  /// queries [Q, B, d] over the tokens memory [M, B, d], plus residual if there is one -> [Q, B, d]
  Tensor operator()(const Tensor& queries, const Tensor& memory, const Tensor& residual = {},
                    Site site = Site::here()) const;
  void fields(auto&& visit) { visit("q", q), visit("kv", kv), visit("out", out); }
  LayerName layer_name;  // for messages

  Linear q, kv, out;  // kv: the rows of the keys' weight, then those of the values'
  int64_t heads;
};

}  // namespace tessera::nn
