#pragma once

#include <vector>

#include "tensor/tensor.h"

namespace tessera::nn {

struct Sequences;

/// Keys and values of the tokens that a model has seen, for generation. A plain tensor [B, capacity, Hk, D]
/// for each, a layer. The number of tokens of each sequence is on the device, where operators read it
/// (ops::decode_attention), so that a step over the cache can be replayed from a graph; the host keeps its
/// own count of the longest.
///
/// Passes of the model go in three parts: `begin` tells the device what comes; every layer writes its keys
/// and values, over an empty cache with `place` or `store` and attends as without a cache, later with
/// `attend`; `advance` is the host's count alone, so that the replay of a pass needs nothing but the first
/// two.
class KvCache {
 public:
  KvCache(int64_t layers, int64_t batch, int64_t capacity, int64_t kv_heads, int64_t head, DType dtype,
          Device device);

  static constexpr int64_t kMostNew = 16;  // tokens of a sequence in one later pass

  int64_t batch() const { return batch_; }
  int64_t capacity() const { return capacity_; }
  /// Tokens of the longest sequence.
  int64_t length() const { return length_; }
  /// i32 [B] on the device: tokens of each.
  const Tensor& lengths() const { return lengths_; }

  /// Into an empty cache come these. One sequence may stand for all B.
  void begin(const Sequences& sequences);
  /// Of that layer: k and v [N, Hk, D] of those sequences, one after the other.
  void store(int64_t layer, const Tensor& k, const Tensor& v, const Sequences& sequences);
  /// The same for B sequences of one length, from the heads of queries, keys and values as the projection
  /// gives them: qkv [B, T, H + 2 Hk, D]. Returns the rotated queries, and k and v in the cache.
  struct Placed {
    Tensor q, k, v;  // [B, T, H or Hk, D]
  };
  Placed place(int64_t layer, const Tensor& qkv, const Tensor& table);

  /// n more tokens of each sequence come: i32 [B, n], their positions.
  Tensor begin(int64_t tokens);
  /// Of that layer: qkv [B, n, H + 2 Hk, D] are the heads of queries, keys and values of the new tokens.
  /// Rotates queries and keys by their positions if `table` (of ops::rope) is defined, writes keys and values
  /// after those of before, and attends to all of them, causal -> [B, n, H, D].
  Tensor attend(int64_t layer, const Tensor& qkv, const Tensor& table);
  void advance(int64_t tokens);

  /// [B, capacity, Hk, D] of one layer, for operators that run several layers at once.
  Tensor keys(int64_t layer) const { return keys_[size_t(layer)].slice(3, 0, head_); }
  Tensor values(int64_t layer) const { return values_[size_t(layer)].slice(3, 0, head_); }

  /// Keeps the first `length` tokens of each sequence; all must have as many.
  void truncate(int64_t length);

  /// Of a full sequence whose further tokens do not matter: it keeps its first capacity - 1 tokens, and the
  /// next pass of one token overwrites its last one, while the other sequences grow.
  void reopen(int64_t sequence);

  void fields(auto&& visit) { visit("keys", keys_), visit("values", values_), visit("length", length_); }

  Tensor rope_table;  // of the positions below capacity, if queries and keys are rotated by them and they
                      // never change

 private:
  int64_t batch_, capacity_, head_, length_ = 0;
  std::vector<Tensor> keys_, values_;  // heads of padded_head_dim(head_) elements, the rest of them zeros
  Tensor lengths_;
};

}  // namespace tessera::nn
