#pragma once

#include "nn/cross_attention.h"
#include "nn/mlp.h"
#include "nn/norm.h"

namespace tessera::nn {

struct PrefixBlockOptions {
  int64_t heads = 1;
  ops::Activation activation = ops::Activation::silu;
  bool pre_norm = false;
  bool bias = true;
  DType dtype = DType::f32;
};

/// A transformer block whose tokens attend to the first `context` of them, the prefix:
///   x = LN(x + attention(x, prefix)),  x = LN(x + MLP(x))
/// or, pre_norm, x = x + attention(LN(x), prefix of LN(x)),  x = x + MLP(LN(x)).
struct PrefixBlock {
  static constexpr const char* kKind = "PrefixBlock";

  /// `hidden`: features of the MLP, 1 or more. Throws unless d is a multiple of the number of heads.
  PrefixBlock(int64_t d, int64_t hidden, const Rng& rng, Device device = Device::cpu(),
              PrefixBlockOptions options = {});
  PrefixBlock(int64_t d, int64_t hidden, const Rng& rng, PrefixBlockOptions options)
      : PrefixBlock(d, hidden, rng, Device::cpu(), options) {}
  /// x [T, B, d], token-major -> [T, B, d], or if `suffix_only` [T - context, B, d]: the tokens after the
  /// prefix alone. With `split` x are this rank's rows, the first `context` of them of the prefix; its
  /// queries are the rows that go on.
  Tensor operator()(const Tensor& x, int64_t context, bool suffix_only = false,
                    const AttentionSplit* split = nullptr, Site site = Site::here()) const;
  void fields(auto&& visit) {
    visit("attention", attention), visit("mlp", mlp), visit("norm1", norm1), visit("norm2", norm2);
  }
  LayerName layer_name;  // for messages

  CrossAttention attention;
  Mlp mlp;
  LayerNorm norm1, norm2;
  bool pre_norm;
};

}  // namespace tessera::nn
