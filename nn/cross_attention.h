#pragma once

#include <string_view>
#include <vector>

#include "comm/communicator.h"
#include "comm/row_split.h"
#include "nn/linear.h"

namespace tessera::nn {

struct CrossAttentionOptions {
  int64_t heads = 1;
  bool bias = true;
  DType dtype = DType::f32;
  Init init = Init::fan_in;
};

/// Attention whose tokens lie on the ranks of a group: each has some rows of the queries and of the memory,
/// and computes its queries' rows of the result. All ranks call the layer together.
///
///   rows    keys and values of the memory are gathered (comm::gather_rows); a rank computes all heads of its
///           queries. Their gradients are sums over the ranks.
///   heads   queries, keys and values change places (comm::rows_to_heads); a rank computes all queries of its
///           heads, and the results change back. Nothing is summed: attention and its gradients are those of
///           one rank. The ranks must divide the heads.
struct AttentionSplit {
  enum class By : uint8_t { rows, heads };
  comm::Communicator group;
  By by = By::rows;
  comm::RowSplit queries, memory;
};
const char* name_of(AttentionSplit::By by);
/// Throws on anything but "rows" and "heads".
AttentionSplit::By parse_attention_split(std::string_view name);

/// out(attention(q, k, v)) with q from some tokens and k and v, from one projection, of others; no mask.
/// Tokens are token-major, [T, B, d]: a prefix or suffix of them is a plain range of the rows.
struct CrossAttention {
  static constexpr const char* kKind = "CrossAttention";

  CrossAttention(int64_t d, const Rng& rng, Device device = Device::cpu(),
                 CrossAttentionOptions options = {});
  CrossAttention(int64_t d, const Rng& rng, CrossAttentionOptions options)
      : CrossAttention(d, rng, Device::cpu(), options) {}
  /// queries [Q, B, d] over the tokens memory [M, B, d], plus residual if there is one -> [Q, B, d]; with
  /// `split` all of them are this rank's rows.
  Tensor operator()(const Tensor& queries, const Tensor& memory, const Tensor& residual = {},
                    const AttentionSplit* split = nullptr, Site site = Site::here()) const;
  void fields(auto&& visit) { visit("q", q), visit("kv", kv), visit("out", out); }
  LayerName layer_name;  // for messages

  Linear q, kv, out;  // kv: the rows of the keys' weight, then those of the values'
  int64_t heads;

 private:
  /// What attention reads, [B, T, H, D] each: queries, and the keys and values of the memory. The only
  /// function that knows on which ranks the memory's tokens lie.
  std::vector<Tensor> attended(const Tensor& queries, const Tensor& memory,
                               const AttentionSplit* split) const;
};

}  // namespace tessera::nn
