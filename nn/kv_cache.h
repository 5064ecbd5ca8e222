#pragma once

#include <vector>

#include "tensor/tensor.h"

namespace tessera::nn {

struct Sequences;

/// Keys and values of the tokens that a model has seen, for generation. A plain tensor [B, capacity, Hk, D]
/// for each, a layer. How many tokens each sequence holds lies on the device, where operators read it
/// (ops::decode_attention), so that a step over the cache can be replayed from a graph; the host keeps its
/// own count of the longest.
///
/// A pass of the model over an empty cache stores what it computed (`store`) and attends as without a cache;
/// then `fill`. Later passes of a few tokens a sequence: `begin(n)`, then `attend` in every layer, then
/// `advance(n)`, which is the host's count alone: a replay needs nothing else.
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

  /// k and v [N, Hk, D] of sequences behind one another, from position 0. One sequence may stand for all B.
  void store(int64_t layer, const Tensor& k, const Tensor& v, const Sequences& sequences);
  /// The cache now holds these.
  void fill(const Sequences& sequences);

  /// n more tokens of each sequence come: i32 [B, n], their positions.
  Tensor begin(int64_t tokens);
  /// Of that layer: qkv [B, n, H + 2 Hk, D] are the heads of queries, keys and values of the new tokens.
  /// Turns queries and keys by their positions if `table` (of ops::rope) is defined, writes keys and values
  /// behind those of before, and attends to all of them, causal -> [B, n, H, D].
  Tensor attend(int64_t layer, const Tensor& qkv, const Tensor& table);
  void advance(int64_t tokens);

  /// Keeps the first `length` tokens of each sequence; all must have as many.
  void truncate(int64_t length);

  void fields(auto&& visit) { visit("keys", keys_), visit("values", values_), visit("length", length_); }

  Tensor rope_table;  // of the positions below capacity, if they turn queries and keys and never change

 private:
  void set_lengths(const std::vector<int64_t>& lengths);

  int64_t batch_, capacity_, length_ = 0;
  std::vector<Tensor> keys_, values_;
  Tensor lengths_;
};

}  // namespace tessera::nn
