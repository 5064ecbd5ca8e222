#include "nn/attention.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "ops/attention/attention.h"
#include "ops/matmul/matmul.h"
#include "ops/pointwise/pointwise.h"
#include "ops/rope/rope.h"
#include "ops/shape/shape.h"
#include "ops/softmax/softmax.h"

namespace tessera::nn {

int64_t Sequences::tokens() const {
  return std::accumulate(lengths.begin(), lengths.end(), int64_t{0});
}

int64_t Sequences::longest() const {
  return lengths.empty() ? 0 : *std::max_element(lengths.begin(), lengths.end());
}

bool Sequences::is_uniform() const {
  return std::all_of(lengths.begin(), lengths.end(), [&](int64_t length) { return length == lengths[0]; });
}

void Sequences::check_tokens(const char* what, int64_t expected) const {
  for (size_t i = 0; i < lengths.size(); ++i)
    check(lengths[i] >= 1, what, ": sequence ", i, " has ", lengths[i], " tokens; expected 1 or more");
  check(tokens() == expected, what, ": ", count(), " sequences of ", tokens(), " tokens in all, but ",
        expected, " are given");
}

Tensor Sequences::positions(int64_t offset, Device device) const {
  std::vector<int64_t> places;
  for (const int64_t length : lengths)
    for (int64_t t = 0; t < length; ++t) places.push_back(offset + t);
  return Tensor::from(places, {int64_t(places.size())}, device);
}

Tensor Sequences::starts(Device device) const {
  std::vector<int64_t> rows;
  int64_t row = 0;
  for (const int64_t length : lengths) {
    rows.push_back(row);
    row += length;
  }
  return Tensor::from(rows, {count()}, device);
}

Tensor repeat_heads(const Tensor& x, int64_t times) {
  if (times == 1) return x;
  const int64_t batch = x.size(0), length = x.size(1), heads = x.size(2), head = x.size(3);
  const Tensor apart = ops::reshape(x, {batch, length, heads, 1, head});
  return ops::reshape(ops::expand(apart, {batch, length, heads, times, head}),
                      {batch, length, heads * times, head});
}

namespace {

/// 0 where query i may see key j, else -inf: j <= i + (keys - queries).
Tensor causal_mask(int64_t queries, int64_t keys, DType dtype, Device device) {
  std::vector<float> mask(size_t(queries * keys), 0.0f);
  for (int64_t i = 0; i < queries; ++i)
    for (int64_t j = i + keys - queries + 1; j < keys; ++j)
      mask[size_t(i * keys + j)] = -std::numeric_limits<float>::infinity();
  return Tensor::from(mask, {queries, keys}).to(dtype).to(device);
}

/// The operator's formula in its parts, with dropout between softmax and the product with v.
Tensor composed(const Tensor& q, const Tensor& k, const Tensor& v, const AttendOptions& options) {
  const auto by_head = [](const Tensor& x) { return ops::transpose(x, 1, 2); };  // [B, H, L, D]
  const double scale = 1 / std::sqrt(double(q.size(3)));
  Tensor scores = ops::scale(ops::matmul(by_head(q), by_head(k), false, true), scale);
  if (options.causal) scores = ops::add(scores, causal_mask(q.size(1), k.size(1), q.dtype(), q.device()));
  const Tensor probabilities = (*options.dropout)(ops::softmax(scores));
  return ops::transpose(ops::matmul(probabilities, by_head(v)), 1, 2);
}

/// [B, L, H, D] of all.
Tensor attend_together(const Tensor& q, const Tensor& k, const Tensor& v, const AttendOptions& options) {
  const int64_t times = q.size(2) / k.size(2);
  const Tensor keys = repeat_heads(k, times), values = repeat_heads(v, times);
  const bool drops = options.dropout && options.dropout->training && options.dropout->p > 0;
  return drops ? composed(q, keys, values, options)
               : ops::attention(q, keys, values, {.causal = options.causal});
}

}  // namespace

Tensor attend(const Tensor& q, const Tensor& k, const Tensor& v, const Sequences& sequences,
              const AttendOptions& options) {
  sequences.check_tokens("attend", q.size(0));
  check(k.size(1) >= 1 && q.size(1) % k.size(1) == 0, "attend: ", q.size(1),
        " query heads are not a multiple of ", k.size(1), " key heads");
  const int64_t count = sequences.count();
  if (sequences.is_uniform()) {
    const auto split = [&](const Tensor& x) {
      return ops::reshape(x, {count, count ? x.size(0) / count : 0, x.size(1), x.size(2)});
    };
    return ops::reshape(attend_together(split(q), split(k), split(v), options), q.shape());
  }
  std::vector<Tensor> parts;
  int64_t row = 0;
  for (const int64_t length : sequences.lengths) {
    const auto part = [&](const Tensor& x) {
      return ops::reshape(ops::slice(x, 0, row, row + length), {1, length, x.size(1), x.size(2)});
    };
    const Tensor mixed = attend_together(part(q), part(k), part(v), options);
    parts.push_back(ops::reshape(mixed, {length, q.size(1), q.size(2)}));
    row += length;
  }
  return ops::concat(parts, 0);
}

// ---- layer ----

SelfAttention::SelfAttention(int64_t d, const SelfAttentionOptions& options, Rng& rng, Device device)
    : qkv(d,
          (options.heads + 2 * (options.kv_heads ? options.kv_heads : options.heads)) *
              (options.head ? options.head : d / options.heads),
          rng, device, {.bias = options.bias, .dtype = options.dtype, .init = Init::zeros}),
      out(options.heads * (options.head ? options.head : d / options.heads), d, rng, device,
          {.bias = options.out_bias, .dtype = options.dtype, .init = Init::zeros}),
      dropout(options.dropout, rng),
      heads(options.heads),
      kv_heads(options.kv_heads ? options.kv_heads : options.heads),
      head(options.head ? options.head : d / options.heads),
      causal(options.causal) {}

Tensor SelfAttention::operator()(const Tensor& x, const AttentionPass& pass, int64_t layer) const {
  const ModuleScope scope("attention");
  const Tensor rows = qkv(x);
  const bool uniform = pass.sequences.is_uniform();
  const int64_t tokens = x.size(0), batch = uniform ? pass.sequences.count() : 1;
  const int64_t length = batch ? tokens / batch : 0;
  if (pass.cache && !pass.fills_cache) {
    const Tensor apart = ops::reshape(rows, {batch, length, heads + 2 * kv_heads, head});
    const Tensor mixed = pass.cache->attend(layer, apart, pass.rope_table);
    return out(ops::reshape(mixed, {tokens, heads * head}));
  }
  const auto heads_of = [&](int64_t begin, int64_t count) {
    return ops::reshape(ops::slice(rows, 1, begin * head, (begin + count) * head),
                        {batch, length, count, head});
  };
  Tensor q, k, v = heads_of(heads + kv_heads, kv_heads);
  const bool placed = pass.cache && pass.rope_table.defined() && uniform && batch == pass.cache->batch();
  if (placed) {
    const KvCache::Placed parts =
        pass.cache->place(layer, heads_of(0, heads + 2 * kv_heads), pass.rope_table);
    q = parts.q, k = parts.k, v = parts.v;
  } else if (pass.rope_table.defined()) {
    // The heads of q and k stand next to each other: one rotation turns all.
    const Tensor both = heads_of(0, heads + kv_heads);
    const Tensor turned =
        pass.positions.defined()
            ? ops::rope(both, pass.rope_table, pass.positions.detach().reshape({batch, length}))
            : ops::rope(both, pass.rope_table);
    q = ops::slice(turned, 2, 0, heads);
    k = ops::slice(turned, 2, heads, heads + kv_heads);
  } else {
    q = heads_of(0, heads);
    k = heads_of(heads, kv_heads);
  }
  const auto flat = [&](const Tensor& t) { return ops::reshape(t, {tokens, t.size(2), head}); };
  if (pass.cache && !placed) pass.cache->store(layer, flat(k), flat(v), pass.sequences);
  const Tensor mixed =
      attend(flat(q), flat(k), flat(v), pass.sequences, {.causal = causal, .dropout = &dropout});
  return out(ops::reshape(mixed, {tokens, heads * head}));
}

}  // namespace tessera::nn
