#pragma once

#include <vector>

#include "nn/dropout.h"
#include "nn/kv_cache.h"
#include "nn/linear.h"

namespace tessera::nn {

/// Which rows of an [N, d] tensor of tokens belong to which sequence: the first lengths[0] rows to the first,
/// the next lengths[1] to the second, ... There is no padding: a token that is not there costs nothing.
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
  Tensor starts(Device device) const;
  /// i64 [count + 1]: the same, and the end of the last, as ops::AttentionSequences has them.
  Tensor cumulative(Device device) const;
};

/// x [B, L, H, D] with each head repeated `times` times, neighbours equal: [B, L, H times, D]. A copy; the
/// gradient is the sum over the repetitions.
Tensor repeat_heads(const Tensor& x, int64_t times);

struct AttendOptions {
  bool causal = false;
  const Dropout* dropout = nullptr;  // of the probabilities
};

/// Attention within each sequence: q [N, H, D], k and v [N, Hk, D] with H a multiple of Hk (query head h
/// reads key head h Hk / H: Ainslie et al., arXiv:2305.13245) -> [N, H, D]. One call of ops::attention,
/// whatever the lengths. `cumulative`, if defined, is that of `sequences`, so that several calls share it.
///
/// Dropout of the probabilities, while training, composes the products, softmax and dropout, each sequence on
/// its own (together if they have one length): that keeps the [L, L] probabilities of every head, as
/// ops::attention never does.
Tensor attend(const Tensor& q, const Tensor& k, const Tensor& v, const Sequences& sequences,
              const AttendOptions& options, const Tensor& cumulative = {});

/// The same for lengths that only the device knows: `starts` as in ops::AttentionSequences. A captured step
/// may be replayed with other values of it. Throws where dropout would drop: that needs the lengths.
Tensor attend(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& starts,
              const AttendOptions& options);

/// Sequences laid side by side, as the parts of attention need them: [B, L] places, those behind a sequence
/// padding.
struct SideBySide {
  int64_t count = 0, length = 0;  // B, L
  Tensor rows;                    // i64 [B L]: the row of each place; of padding any
  Tensor places;                  // i64 [N]: the place of each row; of a row of no sequence any
  Tensor mask;                    // [B, 1, 1, L]: 0, -inf at padding

  /// L is `length`, or the longest if that is 0. Rows behind the last sequence, up to `tokens`, are of none.
  static SideBySide of(const Sequences& sequences, int64_t tokens, DType dtype, Device device,
                       int64_t length = 0);
};

/// What all layers of one pass share.
struct AttentionPass {
  Sequences sequences;
  Tensor rope_table;         // undefined: positions do not turn queries and keys
  Tensor positions = {};     // of the tokens, N of them; undefined: each sequence counts from 0
  KvCache* cache = nullptr;  // then nothing is recorded
  bool fills_cache = false;  // the cache is empty and gets these; else sequences are uniform, and begun
  Tensor starts;  // the lengths of a captured step that is replayed with others: attention reads them instead
                  // of those of `sequences`, and `positions` is needed where positions turn
  mutable Tensor cumulative = {};  // of `sequences` on the device, by the first layer that needs it
  /// For dropout of probabilities, which attention does in parts: of `sequences`, or with `starts` of those.
  /// Without it sequences of different lengths are laid side by side by the first layer that needs it, on a
  /// GPU.
  mutable SideBySide beside = {};
};

struct SelfAttentionOptions {
  int64_t heads = 1;
  int64_t kv_heads = 0;  // 0: as many as heads
  int64_t head = 0;      // size of one; 0: d / heads
  bool causal = false;
  bool bias = true;  // of the fused projection
  bool out_bias = true;
  double dropout = 0;  // of the probabilities
  DType dtype = DType::f32;
};

/// out(attention(q, k, v)) with q, k and v from one projection, whose rows are first the query heads', then
/// the key heads', then the value heads': [N, d] -> [N, d]. Weights and biases start as zeros: a model draws
/// its own.
struct SelfAttention {
  static constexpr const char* kKind = "SelfAttention";

  SelfAttention(int64_t d, const SelfAttentionOptions& options, Rng& rng, Device device);
  Tensor operator()(const Tensor& x, const AttentionPass& pass, int64_t layer = 0) const;
  void fields(auto&& visit) { visit("qkv", qkv), visit("out", out), visit("dropout", dropout); }
  /// Whether probabilities are dropped now.
  bool drops() const { return dropout.training && dropout.p > 0; }

  Linear qkv, out;
  Dropout dropout;
  int64_t heads, kv_heads, head;
  bool causal;
};

}  // namespace tessera::nn
