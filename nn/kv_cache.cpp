#include "nn/kv_cache.h"

#include <algorithm>

#include "nn/attention.h"
#include "ops/attention/head_padding.h"
#include "ops/decode_attention/decode_attention.h"
#include "ops/decode_attention/rope_to_cache.h"
#include "ops/generation/sample.h"

namespace tessera::nn {

KvCache::KvCache(int64_t layers, int64_t batch, int64_t capacity, int64_t kv_heads, int64_t head_dim,
                 DType dtype, Device device)
    : batch_(batch), capacity_(capacity), head_dim_(head_dim) {
  check(layers >= 1 && batch >= 1 && capacity >= 1, "KvCache: ", layers, " layers of ", batch,
        " sequences of ", capacity, " tokens; expected 1 or more of each");
  const int64_t padded = ops::padded_head_dim(head_dim, device);
  const auto heads = [&] {
    const Shape shape{batch, capacity, kv_heads, padded};
    return padded == head_dim ? Tensor::empty(shape, dtype, device) : Tensor::zeros(shape, dtype, device);
  };
  for (int64_t layer = 0; layer < layers; ++layer) {
    keys_.push_back(heads());
    values_.push_back(heads());
  }
  lengths_ = Tensor::zeros({batch}, DType::i32, device);
}

void KvCache::begin(const Sequences& sequences) {
  const int64_t count = sequences.count(), longest = sequences.longest();
  check(length_ == 0, "KvCache: holds ", length_, " tokens; a prompt needs an empty one");
  check(count == batch_ || count == 1, "KvCache: ", count, " sequences, made for ", batch_);
  check(longest <= capacity_, "KvCache: ", longest, " tokens are more than its capacity of ", capacity_);
  const std::vector<int64_t> all(size_t(batch_), longest);
  lengths_.copy_from(Tensor::from(count == batch_ ? sequences.lengths : all, {batch_}));
  begun_ = 0;
}

void KvCache::store(int64_t layer, const Tensor& k, const Tensor& v, const Sequences& sequences) {
  const int64_t count = sequences.count();
  const auto copy = [&](const Tensor& to, const Tensor& from) {
    if (sequences.is_uniform()) {
      const int64_t length = sequences.longest();
      to.slice(1, 0, length).copy_from(from.reshape({count, length, from.size(1), from.size(2)}));
      return;
    }
    int64_t row = 0;
    for (int64_t b = 0; b < count; ++b) {
      const int64_t length = sequences.lengths[size_t(b)];
      to.select(0, b).slice(0, 0, length).copy_from(from.slice(0, row, row + length));
      row += length;
    }
  };
  copy(keys(layer), k);
  copy(values(layer), v);
}

KvCache::RotatedQkv KvCache::rotate_and_store(int64_t layer, const Tensor& qkv, const Tensor& table) {
  Tensor keys = this->keys(layer), values = this->values(layer);
  const Tensor q = ops::rope_to_cache(qkv, table, lengths_, keys, values);
  return {q, keys.slice(1, 0, qkv.size(1)), values.slice(1, 0, qkv.size(1))};
}

Tensor KvCache::begin(int64_t tokens) {
  check(1 <= tokens && tokens <= kMostNew, "KvCache: ", tokens, " tokens in a pass; expected 1 to ",
        kMostNew);
  check(length_ + tokens <= capacity_, "KvCache: ", length_ + tokens,
        " tokens are more than its capacity of ", capacity_);
  const Tensor positions = ops::advance(lengths_, tokens);
  begun_ = tokens;
  return positions;
}

Tensor KvCache::attend(int64_t layer, const Tensor& qkv, const Tensor& table) {
  Tensor keys = this->keys(layer), values = this->values(layer);
  Tensor q;
  if (table.defined()) {
    q = ops::rope_to_cache(qkv, table, lengths_, keys, values);
  } else {
    const int64_t kv_heads = keys.size(2), heads = qkv.size(2) - 2 * kv_heads;
    const Tensor all = qkv.detach();
    ops::append_to_cache(keys, all.slice(2, heads, heads + kv_heads), lengths_);
    ops::append_to_cache(values, all.slice(2, heads + kv_heads, heads + 2 * kv_heads), lengths_);
    q = all.slice(2, 0, heads);
  }
  return ops::decode_attention(q, keys_[size_t(layer)], values_[size_t(layer)], lengths_);
}

void KvCache::advance(int64_t tokens) {
  check(tokens >= 0 && tokens <= capacity_ - length_, "KvCache: ", length_ + tokens,
        " tokens are more than its capacity of ", capacity_);
  length_ += tokens, begun_ = 0;
}

void KvCache::take_back(int64_t tokens) {
  check(0 <= tokens && tokens <= length_, "KvCache: cannot take back ", tokens, " of ", length_, " tokens");
  std::vector<int32_t> lengths = lengths_.to_vector<int32_t>();
  for (int32_t& length : lengths) length -= int32_t(tokens + begun_);
  lengths_.copy_from(Tensor::from(lengths, {batch_}));
  length_ -= tokens, begun_ = 0;
}

void KvCache::reopen(int64_t sequence) {
  check(0 <= sequence && sequence < batch_, "KvCache: there is no sequence ", sequence, " of ", batch_);
  lengths_.slice(0, sequence, sequence + 1).fill(double(capacity_ - 1));
  length_ = std::min(length_, capacity_ - 1);
}

void KvCache::truncate(int64_t length) {
  check(0 <= length && length <= length_, "KvCache: cannot keep ", length, " of ", length_, " tokens");
  lengths_.fill(double(length));
  length_ = length, begun_ = 0;
}

}  // namespace tessera::nn
