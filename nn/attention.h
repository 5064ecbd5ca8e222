#pragma once

#include <optional>
#include <vector>

#include "nn/dropout.h"
#include "nn/kv_cache.h"
#include "nn/linear.h"
#include "nn/norm.h"

namespace tessera::nn {

/// Which rows of an [N, d] tensor of tokens belong to which sequence: the first lengths[0] rows to the first,
/// the next lengths[1] to the second, ... There is no padding, so shorter sequences cost no more than their
/// tokens.
struct Sequences {
  std::vector<int64_t> lengths;

  static Sequences uniform(int64_t count, int64_t length) {
    return {std::vector<int64_t>(size_t(count), length)};
  }
  int64_t count() const { return int64_t(lengths.size()); }
  int64_t tokens() const;
  int64_t longest() const;  // 0 if there are none
  /// All of one length (also: none at all).
  bool is_uniform() const;
  /// Throws, naming `what`, unless there are `tokens` tokens, and one or more in each sequence.
  void check_tokens(const char* what, int64_t tokens) const;
  /// i64 [N]: the place of each token within its sequence, plus `offset`.
  Tensor positions(int64_t offset, Device device) const;
  /// i64 [count]: the row of the first token of each sequence.
  Tensor first_rows(Device device) const;
  /// i64 [count + 1]: the same, and the end of the last, as ops::AttentionSequences has them.
  Tensor cu_seqlens(Device device) const;
};

struct AttendOptions {
  bool causal = false;
  const Dropout* dropout = nullptr;  // of the probabilities, its p rounded as ops::attention rounds it
  Tensor bias = {};  // of the scores [B, H, L, L], as ops::AttentionOptions has it: sequences of one length
};

/// Attention within each sequence: q [N, H, D], k and v [N, Hk, D] with H a multiple of Hk (query head h
/// reads key head h Hk / H: Ainslie et al., arXiv:2305.13245) -> [N, H, D]. One call of ops::attention,
/// whatever the lengths and whether probabilities are dropped.
Tensor attend(const Tensor& q, const Tensor& k, const Tensor& v, const Sequences& sequences,
              const AttendOptions& options, Site site = Site::here());

/// The same for lengths on the device: as in ops::AttentionSequences (Sequences::cu_seqlens). A
/// captured step may be replayed with other values of it.
Tensor attend(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& cu_seqlens,
              const AttendOptions& options, Site site = Site::here());

/// The state that all layers of one pass share.
struct AttentionPass {
  Sequences sequences;
  Tensor rope_table = {};    // undefined: queries and keys are not rotated
  Tensor positions = {};     // position of each token, [N]; undefined: each sequence counts from 0
  KvCache* cache = nullptr;  // not null: inference with a KV cache, nothing is recorded
  bool fills_cache = false;  // prefill: the cache is empty; else decode: sequences are uniform and begun
  Tensor cu_seqlens = {};    // the lengths of a captured step that is replayed with others: attention reads
                           // them instead of those of `sequences`, and `positions` is needed where positions
                           // turn
  Tensor rows = {};                     // [R], i64 or i32: tokens whose results are needed; undefined: all
  int64_t rows_from = 0;                // index of the first layer that computes only `rows`
  mutable Tensor valid = {};            // see valid_rows()
  mutable Tensor made_cu_seqlens = {};  // of `sequences`, by the first layer that needs it

  /// Whether that layer computes only `rows`.
  bool narrows(int64_t layer) const { return rows.defined() && layer >= rows_from; }
  /// Number of rows that hold tokens, i32 [1] on the device, if only `cu_seqlens` says so; undefined: all
  /// rows.
  const Tensor& valid_rows() const;
  /// The rows of x [N, ...] that this layer must compute.
  Tensor wanted(const Tensor& x, int64_t layer) const;
};

struct SelfAttentionOptions {
  int64_t heads = 1;
  int64_t kv_heads = 0;  // 0: as many as heads
  int64_t head_dim = 0;  // 0: d / heads
  bool causal = false;
  bool bias = true;  // of the fused projection
  bool out_bias = true;
  std::optional<double> qk_norm_eps = {};  // given: RMSNorm of each head of queries and keys
  double dropout = 0;                      // of the probabilities
  DType dtype = DType::f32;
  Init init = Init::fan_in;  // of both linear layers
};

/// out(attention(q, k, v)) with q, k and v from one projection, whose rows are first the query heads', then
/// the key heads', then the value heads': [N, d] -> [N, d], or [R, d] of the tokens that pass.rows names.
/// With qk_norm_eps each head of q and of k is normalised (one weight for all heads of q, one for those of k:
/// Dehghani et al., arXiv:2302.05442, section 2) before positions rotate it.
/// Throws unless heads is a multiple of kv_heads, and d one of heads where head_dim is not given.
struct SelfAttention {
  static constexpr const char* kKind = "SelfAttention";

  SelfAttention(int64_t d, const Rng& rng, Device device = Device::cpu(), SelfAttentionOptions options = {});
  SelfAttention(int64_t d, const Rng& rng, SelfAttentionOptions options)
      : SelfAttention(d, rng, Device::cpu(), options) {}
  Tensor operator()(const Tensor& x, const AttentionPass& pass, int64_t layer = 0,
                    Site site = Site::here()) const;
  void fields(auto&& visit) {
    visit("qkv", qkv), visit("q_norm", q_norm), visit("k_norm", k_norm), visit("out", out);
    visit("dropout", dropout);
  }
  LayerName layer_name;  // for messages

  Linear qkv, out;
  std::optional<RmsNorm> q_norm, k_norm;
  Dropout dropout;
  int64_t heads, kv_heads, head_dim;
  bool causal;
};

}  // namespace tessera::nn
