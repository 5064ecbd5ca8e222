#include "nn/attention.h"

#include <algorithm>
#include <numeric>

#include "nn/drop_bp.h"
#include "nn/slice_scope.h"
#include "ops/attention/attention.h"
#include "ops/gather/gather.h"
#include "ops/rope/rope.h"
#include "ops/shape/shape.h"

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

Tensor Sequences::first_rows(Device device) const {
  std::vector<int64_t> rows;
  int64_t row = 0;
  for (const int64_t length : lengths) {
    rows.push_back(row);
    row += length;
  }
  return Tensor::from(rows, {count()}, device);
}

Tensor Sequences::cu_seqlens(Device device) const {
  std::vector<int64_t> rows{0};
  for (const int64_t length : lengths) rows.push_back(rows.back() + length);
  return Tensor::from(rows, {count() + 1}, device);
}

namespace {

ops::AttentionOptions operator_options(const AttendOptions& options) {
  ops::AttentionOptions made{.causal = options.causal, .bias = options.bias};
  if (options.dropout && options.dropout->training) {
    made.dropout = options.dropout->p;
    made.rng = options.dropout->rng;
  }
  return made;
}

int64_t kv_heads_of(const SelfAttentionOptions& options) {
  return options.kv_heads ? options.kv_heads : options.heads;
}

/// Throws unless the numbers go together.
int64_t head_dim_of(int64_t d, const SelfAttentionOptions& options) {
  const int64_t heads = options.heads, kv_heads = kv_heads_of(options), head_dim = options.head_dim;
  check(heads >= 1 && kv_heads >= 1 && heads % kv_heads == 0, "self attention: ", heads, " heads and ",
        kv_heads, " kv_heads; expected a multiple of the kv_heads, 1 or more");
  check(head_dim >= 0, "self attention: head_dim is ", head_dim, "; expected 1 or more, or 0 for d / heads");
  check(head_dim > 0 || d % heads == 0, "self attention: d ", d, " is not a multiple of the number of heads ",
        heads, "; give head_dim");
  return head_dim ? head_dim : d / heads;
}

void check_heads(const Tensor& q, const Tensor& k) {
  check(k.size(1) >= 1 && q.size(1) % k.size(1) == 0, "attend: ", q.size(1),
        " query heads are not a multiple of ", k.size(1), " key heads");
}

}  // namespace

Tensor attend(const Tensor& q, const Tensor& k, const Tensor& v, const Sequences& sequences,
              const AttendOptions& options, Site site) {
  const CallScope call(site);
  sequences.check_tokens("attend", q.size(0));
  check_heads(q, k);
  const int64_t count = sequences.count();
  if (sequences.is_uniform()) {
    const auto split = [&](const Tensor& x) {
      return ops::reshape(x, {count, count ? x.size(0) / count : 0, x.size(1), x.size(2)});
    };
    return ops::reshape(ops::attention(split(q), split(k), split(v), operator_options(options)), q.shape());
  }
  return attend(q, k, v, sequences.cu_seqlens(q.device()), options);
}

Tensor attend(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& cu_seqlens,
              const AttendOptions& options, Site site) {
  const CallScope call(site);
  check_heads(q, k);
  return ops::attention(q, k, v, ops::AttentionSequences{cu_seqlens}, operator_options(options));
}

// ---- layer ----

Tensor AttentionPass::wanted(const Tensor& x, int64_t layer) const {
  return narrows(layer) ? ops::gather_rows(x, rows) : x;
}

const Tensor& AttentionPass::valid_rows() const {
  if (cu_seqlens.defined() && !valid.defined()) {
    const Tensor all = cu_seqlens.detach();
    valid = all.slice(0, all.size(0) - 1, all.size(0)).to(DType::i32).packed();
  }
  return valid;
}

SelfAttention::SelfAttention(int64_t d, const Rng& rng, Device device, SelfAttentionOptions options)
    : qkv(d, (options.heads + 2 * kv_heads_of(options)) * head_dim_of(d, options), rng, device,
          {.bias = options.bias, .dtype = options.dtype, .init = options.init}),
      out(options.heads * head_dim_of(d, options), d, rng, device,
          {.bias = options.out_bias, .dtype = options.dtype, .init = options.init}),
      dropout(options.dropout, rng),
      heads(options.heads),
      kv_heads(kv_heads_of(options)),
      head_dim(head_dim_of(d, options)),
      causal(options.causal) {
  if (!options.qk_norm_eps) return;
  const RmsNormOptions norm{.eps = *options.qk_norm_eps, .dtype = options.dtype};
  q_norm.emplace(head_dim, device, norm);
  k_norm.emplace(head_dim, device, norm);
}

Tensor SelfAttention::operator()(const Tensor& x, const AttentionPass& pass, int64_t layer, Site site) const {
  if (DropBP::drops(this)) return DropBP::off_tape({}, [&] { return (*this)(x, pass, layer, site); });
  const LayerCall call(*this, site);
  const bool uniform = !pass.cu_seqlens.defined() && pass.sequences.is_uniform();
  const int64_t tokens = x.size(0), all = heads + 2 * kv_heads;
  if (!pass.cu_seqlens.defined()) pass.sequences.check_tokens("attend", tokens);
  const AttendOptions options{.causal = causal, .dropout = &dropout};
  // Sequences of one length are a batch; others stand one after another.
  const int64_t batch = uniform ? pass.sequences.count() : 1, length = batch ? tokens / batch : 0;
  const Shape by_batch{batch, length, all, head_dim}, by_token{tokens, all, head_dim};
  const SliceScope tokens_alone(&pass);
  const Tensor rows = ops::reshape(qkv(x), uniform ? by_batch : by_token);
  const auto joined = [&](const Tensor& mixed) {
    const SliceScope wanted_alone(pass.narrows(layer) ? nullptr : &pass);
    return out(pass.wanted(ops::reshape(mixed, {tokens, heads * head_dim}), layer));
  };
  const int by_head = uniform ? 2 : 1;
  const bool normalises = q_norm.has_value() && !pass.cache;
  if (q_norm && pass.cache) {
    // Nothing is recorded, so the heads are normalised where they lie, as the cache takes them.
    const Tensor all_heads = rows.detach();
    const Tensor q = all_heads.slice(by_head, 0, heads),
                 k = all_heads.slice(by_head, heads, heads + kv_heads);
    q.copy_from((*q_norm)(q));
    k.copy_from((*k_norm)(k));
  }
  if (pass.cache && !pass.fills_cache)
    return joined(pass.cache->attend(layer, ops::reshape(rows, by_batch), pass.rope_table));
  const bool placed = pass.cache && pass.rope_table.defined() && uniform && batch == pass.cache->batch();
  const auto rotated = [&](const Tensor& t) {
    if (!pass.rope_table.defined()) return t;
    const Tensor of_batch = uniform ? t : ops::reshape(t, {batch, length, t.size(1), head_dim});
    const Tensor turned =
        pass.positions.defined()
            ? ops::rope(of_batch, pass.rope_table, pass.positions.detach().reshape({batch, length}))
            : ops::rope(of_batch, pass.rope_table);
    return uniform ? turned : ops::reshape(turned, t.shape());
  };
  Tensor q, k, v;
  if (placed) {
    const KvCache::RotatedQkv parts = pass.cache->rotate_and_store(layer, rows, pass.rope_table);
    q = parts.q, k = parts.k, v = parts.v;
  } else if (pass.rope_table.defined() && !normalises) {
    // The heads of q and k stand next to each other: one rotation turns all.
    const auto parts = ops::split(rows, by_head, {heads + kv_heads, kv_heads});
    const auto turns = ops::split(rotated(parts[0]), by_head, {heads, kv_heads});
    q = turns[0], k = turns[1], v = parts[1];
  } else {
    const auto parts = ops::split(rows, by_head, {heads, kv_heads, kv_heads});
    q = rotated(normalises ? (*q_norm)(parts[0]) : parts[0]);
    k = rotated(normalises ? (*k_norm)(parts[1]) : parts[1]);
    v = parts[2];
  }
  if (pass.cache && !placed) {
    const auto flat = [&](const Tensor& t) { return ops::reshape(t, {tokens, kv_heads, head_dim}); };
    pass.cache->store(layer, flat(k), flat(v), pass.sequences);
  }
  if (uniform) return joined(ops::attention(q, k, v, operator_options(options)));
  if (pass.cu_seqlens.defined()) return joined(attend(q, k, v, pass.cu_seqlens, options));
  if (!pass.made_cu_seqlens.defined()) pass.made_cu_seqlens = pass.sequences.cu_seqlens(x.device());
  return joined(attend(q, k, v, pass.made_cu_seqlens, options));
}

}  // namespace tessera::nn
