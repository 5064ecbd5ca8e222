#pragma once

#include <vector>

#include "tensor/tensor.h"

namespace tessera::nn {

struct Sequences;

/// Keys and values of the tokens that a model has processed, for generation: per layer, two tensors [B,
/// capacity, Hk, D]. The length of each sequence is on the device, where operators read it
/// (ops::decode_attention), so that a step can be replayed from a graph; the host counts the longest
/// one.
///
/// A forward pass has three parts. `begin` sets the lengths on the device. Every layer writes its
/// keys and values: in prefill with `rotate_and_store` or `store`, attending as without a cache; in decode
/// with `attend`. `advance` updates only the host's count, so that a replay consists of the first
/// two.
class KvCache {
 public:
  KvCache(int64_t layers, int64_t batch, int64_t capacity, int64_t kv_heads, int64_t head_dim, DType dtype,
          Device device);

  static constexpr int64_t kMostNew = 16;  // tokens per sequence in one decode pass

  int64_t batch() const { return batch_; }
  int64_t capacity() const { return capacity_; }
  /// Tokens of the longest sequence.
  int64_t length() const { return length_; }
  /// i32 [B] on the device: tokens of each.
  const Tensor& lengths() const { return lengths_; }

  /// Starts prefill of an empty cache with these sequences. One sequence may be broadcast to all B.
  void begin(const Sequences& sequences);
  /// Writes one layer's k and v [N, Hk, D] of those packed sequences.
  void store(int64_t layer, const Tensor& k, const Tensor& v, const Sequences& sequences);
  /// The same for B sequences of one length, from the projection's output: qkv [B, T, H + 2 Hk, D], heads of
  /// queries, keys and values. Applies RoPE. Returns the rotated queries, and views of k and v in the cache.
  struct RotatedQkv {
    Tensor q, k, v;  // [B, T, H or Hk, D]
  };
  RotatedQkv rotate_and_store(int64_t layer, const Tensor& qkv, const Tensor& table);

  /// Starts a decode pass of `tokens` new tokens per sequence. Returns their positions, i32 [B, tokens].
  Tensor begin(int64_t tokens);
  /// One layer of decode: qkv [B, n, H + 2 Hk, D], heads of queries, keys and values of the new tokens.
  /// Applies RoPE if `table` (of ops::rope) is defined, appends keys and values to the cache, and attends
  /// causally to all cached tokens -> [B, n, H, D].
  Tensor attend(int64_t layer, const Tensor& qkv, const Tensor& table);
  void advance(int64_t tokens);

  /// [B, capacity, Hk, D] of one layer, for operators that run several layers at once.
  Tensor keys(int64_t layer) const { return keys_[size_t(layer)].slice(3, 0, head_dim_); }
  Tensor values(int64_t layer) const { return values_[size_t(layer)].slice(3, 0, head_dim_); }

  /// Removes the last `tokens` of each sequence, and those of a decode pass that ended before advance(), as
  /// an error ends it. Waits for the device.
  void take_back(int64_t tokens);
  /// Keeps the first `length` tokens of each sequence; all must have as many.
  void truncate(int64_t length);

  /// Shortens a full sequence, whose further tokens do not matter, to capacity - 1 tokens: the next pass of
  /// one token overwrites its last one, while the other sequences grow.
  void reopen(int64_t sequence);

  void fields(auto&& visit) { visit("keys", keys_), visit("values", values_), visit("length", length_); }

  Tensor rope_table;  // of the positions below capacity, if queries and keys are rotated by them and they
                      // never change

 private:
  int64_t batch_, capacity_, head_dim_, length_ = 0;
  int64_t begun_ = 0;                  // tokens of a decode pass that lengths_ has and length_ has not
  std::vector<Tensor> keys_, values_;  // heads of padded_head_dim(head_dim_) elements; the padding is zero
  Tensor lengths_;
};

}  // namespace tessera::nn
