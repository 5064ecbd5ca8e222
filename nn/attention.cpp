#include "nn/attention.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "ops/attention/attention.h"
#include "ops/gather/gather.h"
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

Tensor Sequences::cumulative(Device device) const {
  std::vector<int64_t> rows{0};
  for (const int64_t length : lengths) rows.push_back(rows.back() + length);
  return Tensor::from(rows, {count() + 1}, device);
}

SideBySide SideBySide::of(const Sequences& sequences, int64_t tokens, DType dtype, Device device,
                          int64_t length) {
  const int64_t count = sequences.count(), width = length > 0 ? length : sequences.longest();
  std::vector<int64_t> rows(size_t(count * width), 0), places(size_t(tokens), 0);
  std::vector<float> mask(rows.size(), -std::numeric_limits<float>::infinity());
  int64_t row = 0;
  for (int64_t b = 0; b < count; ++b) {
    const int64_t own = sequences.lengths[size_t(b)];
    check(own <= width && row + own <= tokens, "attend: a sequence of ", own, " tokens does not fit into ",
          width, ", or those before it leave no room in ", tokens, " rows");
    for (int64_t t = 0; t < own; ++t, ++row) {
      const auto place = size_t(b * width + t);
      rows[place] = row, places[size_t(row)] = int64_t(place), mask[place] = 0;
    }
  }
  return {count, width, Tensor::from(rows, {count * width}, device), Tensor::from(places, {tokens}, device),
          Tensor::from(mask, {count, 1, 1, width}).to(dtype).to(device)};
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

bool drops(const AttendOptions& options) {
  return options.dropout && options.dropout->training && options.dropout->p > 0;
}

/// The operator's formula in its parts, with dropout between softmax and the product with v: [B, L, H, D].
/// `mask` is added to the scores, if defined. q, k and v are copied so that batch and head are one dimension:
/// each product is one launch then, where the strides of both would make it one a batch. It is q that is
/// scaled: it has fewer elements than the scores.
Tensor composed(const Tensor& q, const Tensor& k, const Tensor& v, const AttendOptions& options,
                const Tensor& mask = {}) {
  const int64_t batch = q.size(0), heads = q.size(2), queries = q.size(1), keys = k.size(1);
  const auto by_head = [&](const Tensor& x) {
    return ops::reshape(ops::transpose(repeat_heads(x, heads / x.size(2)), 1, 2),
                        {batch * heads, x.size(1), x.size(3)});
  };
  const double scale = 1 / std::sqrt(double(q.size(3)));
  Tensor scores = ops::matmul(ops::scale(by_head(q), scale), by_head(k), false, true);
  if (mask.defined()) {
    const Tensor apart = ops::add(ops::reshape(scores, {batch, heads, queries, keys}), mask);
    scores = ops::reshape(apart, {batch * heads, queries, keys});
  }
  if (options.causal) scores = ops::add(scores, causal_mask(queries, keys, q.dtype(), q.device()));
  const Tensor probabilities = (*options.dropout)(ops::softmax(scores));
  const Tensor mixed = ops::matmul(probabilities, by_head(v));
  return ops::transpose(ops::reshape(mixed, {batch, heads, queries, v.size(3)}), 1, 2);
}

/// [B, L, H, D] of all.
Tensor attend_batch(const Tensor& q, const Tensor& k, const Tensor& v, const AttendOptions& options) {
  return drops(options) ? composed(q, k, v, options) : ops::attention(q, k, v, {.causal = options.causal});
}

void check_heads(const Tensor& q, const Tensor& k) {
  check(k.size(1) >= 1 && q.size(1) % k.size(1) == 0, "attend: ", q.size(1),
        " query heads are not a multiple of ", k.size(1), " key heads");
}

}  // namespace

Tensor attend(const Tensor& q, const Tensor& k, const Tensor& v, const Sequences& sequences,
              const AttendOptions& options, const Tensor& cumulative) {
  sequences.check_tokens("attend", q.size(0));
  check_heads(q, k);
  const int64_t count = sequences.count();
  if (sequences.is_uniform()) {
    const auto split = [&](const Tensor& x) {
      return ops::reshape(x, {count, count ? x.size(0) / count : 0, x.size(1), x.size(2)});
    };
    const Tensor mixed = attend_batch(split(q), split(k), split(v), options);
    return ops::reshape(mixed, q.shape());
  }
  if (!drops(options))
    return attend(q, k, v, cumulative.defined() ? cumulative : sequences.cumulative(q.device()), options);
  std::vector<Tensor> parts;
  int64_t row = 0;
  for (const int64_t length : sequences.lengths) {
    const auto part = [&](const Tensor& x) {
      return ops::reshape(ops::slice(x, 0, row, row + length), {1, length, x.size(1), x.size(2)});
    };
    parts.push_back(
        ops::reshape(composed(part(q), part(k), part(v), options), {length, q.size(1), q.size(2)}));
    row += length;
  }
  return ops::concat(parts, 0);
}

Tensor attend(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& starts,
              const AttendOptions& options) {
  check_heads(q, k);
  check(!drops(options), "attend: dropout of probabilities needs the lengths of the sequences on the host");
  return ops::attention(q, k, v, ops::AttentionSequences{starts}, {.causal = options.causal});
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
  const bool uniform = !pass.starts.defined() && pass.sequences.is_uniform();
  const int64_t tokens = x.size(0), all = heads + 2 * kv_heads;
  if (!pass.starts.defined()) pass.sequences.check_tokens("attend", tokens);
  const AttendOptions options{.causal = causal, .dropout = &dropout};
  if (drops() && !uniform && !pass.cache && !pass.rope_table.defined()) {
    if (!pass.beside.rows.defined() && !pass.starts.defined() && x.device().is_cuda())
      pass.beside = SideBySide::of(pass.sequences, tokens, x.dtype(), x.device());
    if (const SideBySide& beside = pass.beside; beside.rows.defined()) {
      // One gather of the whole projection and one back: what is padding there is read by no row.
      const Tensor apart = ops::gather_rows(qkv(x), beside.rows);
      const auto parts = ops::split(ops::reshape(apart, {beside.count, beside.length, all, head}), 2,
                                    {heads, kv_heads, kv_heads});
      const Tensor mixed = composed(parts[0], parts[1], parts[2], options, beside.mask);
      return out(
          ops::gather_rows(ops::reshape(mixed, {beside.count * beside.length, heads * head}), beside.places));
    }
  }
  // Sequences of one length are a batch; others stand behind one another.
  const int64_t batch = uniform ? pass.sequences.count() : 1, length = batch ? tokens / batch : 0;
  const Shape by_batch{batch, length, all, head}, by_token{tokens, all, head};
  const Tensor rows = ops::reshape(qkv(x), uniform ? by_batch : by_token);
  const auto joined = [&](const Tensor& mixed) { return out(ops::reshape(mixed, {tokens, heads * head})); };
  if (pass.cache && !pass.fills_cache)
    return joined(pass.cache->attend(layer, ops::reshape(rows, by_batch), pass.rope_table));
  const bool placed = pass.cache && pass.rope_table.defined() && uniform && batch == pass.cache->batch();
  const int by_head = uniform ? 2 : 1;
  Tensor q, k, v;
  if (placed) {
    const KvCache::Placed parts = pass.cache->place(layer, rows, pass.rope_table);
    q = parts.q, k = parts.k, v = parts.v;
  } else if (pass.rope_table.defined()) {
    // The heads of q and k stand next to each other: one rotation turns all.
    const auto parts = ops::split(rows, by_head, {heads + kv_heads, kv_heads});
    const Tensor both = uniform ? parts[0] : ops::reshape(parts[0], {batch, length, heads + kv_heads, head});
    const Tensor turned =
        pass.positions.defined()
            ? ops::rope(both, pass.rope_table, pass.positions.detach().reshape({batch, length}))
            : ops::rope(both, pass.rope_table);
    const auto turns =
        ops::split(uniform ? turned : ops::reshape(turned, parts[0].shape()), by_head, {heads, kv_heads});
    q = turns[0], k = turns[1], v = parts[1];
  } else {
    const auto parts = ops::split(rows, by_head, {heads, kv_heads, kv_heads});
    q = parts[0], k = parts[1], v = parts[2];
  }
  if (pass.cache && !placed) {
    const auto flat = [&](const Tensor& t) { return ops::reshape(t, {tokens, kv_heads, head}); };
    pass.cache->store(layer, flat(k), flat(v), pass.sequences);
  }
  if (uniform) return joined(attend_batch(q, k, v, options));
  if (pass.starts.defined()) return joined(attend(q, k, v, pass.starts, options));
  if (!pass.cumulative.defined()) pass.cumulative = pass.sequences.cumulative(x.device());
  return joined(attend(q, k, v, pass.sequences, options, pass.cumulative));
}

}  // namespace tessera::nn
