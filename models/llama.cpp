#include "models/llama.h"

#include <algorithm>

#include "models/language_internal.h"
#include "ops/cross_entropy/cross_entropy.h"
#include "ops/shape/shape.h"
#include "runtime/text.h"

namespace tessera::models {

using namespace language_internal;

namespace {

constexpr const char* kFamilies[] = {"llama", "mistral", "qwen2", "qwen3", "phi3", "arcee"};

}  // namespace

const char* name_of(LlamaFamily family) {
  return kFamilies[size_t(family)];
}

LlamaFamily parse_llama_family(std::string_view name) {
  return parse_name<LlamaFamily>("llama: there is no family", kFamilies, name);
}

int64_t LlamaConfig::longest() const {
  const int64_t reach = rope.scaling == ops::RopeScaling::dynamic ? kEndless : positions;
  return window > 0 ? std::min(reach, window) : reach;
}

void LlamaConfig::validate() const {
  const char* const name = name_of(family);
  check_sizes(name, {{"vocabulary", vocabulary},
                     {"positions", positions},
                     {"d_model", d_model},
                     {"d_ff", d_ff},
                     {"heads", heads},
                     {"kv_heads", kv_heads},
                     {"layers", layers}});
  check(head_dim >= 0, name, ": head_dim is ", head_dim);
  check(head_dim > 0 || d_model % heads == 0, name, ": d_model ", d_model,
        " is not a multiple of the number of heads ", heads);
  check(partial_rotary > 0 && partial_rotary <= 1, name, ": partial_rotary is ", partial_rotary,
        "; expected more than 0 and at most 1");
  if (partial_rotary == 1)
    check(effective_head_dim() >= 2 && effective_head_dim() % 2 == 0, name, ": heads of ",
          effective_head_dim(), " elements; positions turn pairs, so the size must be even");
  check(rotary() >= 2 && rotary() % 2 == 0, name, ": partial_rotary ", partial_rotary, " of a head of ",
        effective_head_dim(), " elements are ", rotary(),
        "; positions rotate pairs, so it must be an even number");
  check(heads % kv_heads == 0, name, ": ", heads, " heads are not a multiple of ", kv_heads, " kv_heads");
  check(window >= 0, name, ": window is ", window, "; expected 0 (none) or more");
  check(full_layers == 0 || (window > 0 && full_layers > 0 && full_layers < layers), name,
        ": full_layers is ", full_layers, " of ", layers, " layers with a window of ", window,
        "; expected 0, or some but not all layers of a model with a window");
  rope.validate();
  if (rope.scaling == ops::RopeScaling::longrope)
    for (const int64_t length : {rope.trained_length, rope.trained_length + 1})
      ops::rope_frequencies(rope, rotary(), length);  // or throws: another number of factors
  // What a config.json of the family cannot say would be lost when the model is saved.
  const bool is_llama = family == LlamaFamily::llama, is_arcee = family == LlamaFamily::arcee;
  const std::pair<const char*, bool> settings[] = {
      {"attention_bias", attention_bias && !is_llama && !is_arcee && family != LlamaFamily::qwen3},
      {"mlp_bias", mlp_bias && !is_llama && !is_arcee},
      {"an MLP without gate", !gated && !is_llama && !is_arcee},
      {"a gated MLP", gated && is_arcee},
      {"partial_rotary below 1", partial_rotary != 1 && family != LlamaFamily::phi3},
      {"a sliding window", window > 0 && (is_llama || is_arcee)},
      {"layers without the window",
       full_layers > 0 && family != LlamaFamily::qwen2 && family != LlamaFamily::qwen3}};
  for (const auto& [setting, foreign] : settings)
    check(!foreign, name, ": there is no ", name, " with ", setting);
}

LlamaConfig LlamaConfig::share(int ranks) const {
  validate();
  if (ranks == 1) return *this;
  const std::pair<const char*, int64_t> sizes[] = {{"heads", heads}, {"kv_heads", kv_heads}, {"d_ff", d_ff}};
  for (const auto& [size_name, size] : sizes)
    check(size % ranks == 0, name_of(family), ": ", size_name, " is ", size, ", which ", ranks,
          " ranks do not divide; each needs as many of the ", heads, " heads, ", kv_heads, " kv_heads and ",
          d_ff, " hidden features");
  LlamaConfig one = *this;
  one.head_dim = effective_head_dim();
  one.heads /= ranks, one.kv_heads /= ranks, one.d_ff /= ranks;
  one.vocabulary = nn::TensorParallel::vocabulary_rows(vocabulary, ranks);
  return one;
}

namespace {

nn::RmsNormOptions norm_options(const LlamaConfig& config) {
  return {.eps = config.eps, .dtype = config.dtype};
}

/// The norm of a stream whose branch is, on several ranks, a share of a sum over them.
ops::AddNorm stream_norm(const nn::TensorParallel& ranks, const nn::RmsNorm& norm, const Residual& x) {
  return ranks.shares() && x.branch.defined() ? ranks.add(norm, x.sum, x.branch)
                                              : language_internal::add_norm(norm, x);
}

}  // namespace

LlamaBlock::LlamaBlock(const LlamaConfig& config, const Rng& rng, Device device,
                       const nn::TensorParallel& ranks)
    : norm1(config.d_model, device, norm_options(config)),
      attention(config.d_model, rng, device,
                {.heads = config.heads,
                 .kv_heads = config.kv_heads,
                 .head_dim = config.effective_head_dim(),
                 .causal = true,
                 .bias = config.qkv_bias(),
                 .out_bias = config.attention_bias,
                 .qk_norm_eps = config.qk_norm() ? std::optional(config.eps) : std::nullopt,
                 .dropout = config.attention_dropout,
                 .dtype = config.dtype,
                 .init = nn::Init::zeros}),
      norm2(config.d_model, device, norm_options(config)),
      mlp(config.d_model, config.d_ff, rng, device,
          {.activation = config.activation,
           .gated = config.gated,
           .bias = config.mlp_bias,
           .dtype = config.dtype,
           .init = nn::Init::zeros}),
      dropout(config.residual_dropout, rng),
      ranks(ranks) {}

Residual LlamaBlock::attend(const Residual& x, const nn::AttentionPass& pass, int64_t layer,
                            Site site) const {
  const nn::LayerCall call(*this, site);
  const auto [sum, normed] = stream_norm(ranks, norm1, x);
  return {sum, dropout(attention(normed, pass, layer))};
}

Residual LlamaBlock::feed(const Residual& x, Site site) const {
  const nn::LayerCall call(*this, site);
  const auto [sum, normed] = stream_norm(ranks, norm2, x);
  return {sum, dropout(mlp(normed))};
}

Llama::Llama(const LlamaConfig& given, const Rng& rng, Device device, Start start,
             const nn::TensorParallel& ranks)
    : Llama(given, given.share(ranks.size()), rng, device, start, ranks) {}

Llama::Llama(const LlamaConfig& whole, const LlamaConfig& share, const Rng& rng, Device device, Start start,
             const nn::TensorParallel& ranks)
    : config(whole),
      ranks(ranks),
      token(share.vocabulary, config.d_model, rng, device, {.deviation = 0, .dtype = config.dtype}),
      norm(config.d_model, device, norm_options(config)),
      lm_head(config.d_model, share.vocabulary, rng, device,
              {.tied = config.tied, .dtype = config.dtype, .init = nn::Init::zeros}),
      dropout(config.embedding_dropout, rng) {
  for (int64_t i = 0; i < config.layers; ++i) blocks.emplace_back(share, rng, device, ranks);
  if (ranks.shares()) {
    check(start == Start::blank, name_of(config.family), ": a model that is shared out over ", ranks.size(),
          " ranks starts blank: initial values are drawn for a whole model");
    ranks.ranks().reserve(device, config.dtype, config.d_model, share.vocabulary);
  }
  if (start == Start::blank) return;
  const double deviation = config.init_deviation;
  nn::init::normal(token.weight, rng, 0, deviation);
  for (const LlamaBlock& block : blocks)
    for (const nn::Linear* linear :
         {&block.attention.qkv, &block.attention.out, &block.mlp.up, &block.mlp.down})
      draw(*linear, rng, deviation);
  if (!lm_head.tied()) draw(lm_head.out, rng, deviation);
}

Tensor Llama::rope_table(int64_t length) const {
  const Device device = token.weight.device();
  const auto serves = [&](int64_t rows) {
    return rows >= length && ops::rope_same_angles(config.rope, rows, length);
  };
  const DType dtype = config.dtype == DType::f64 ? DType::f64 : DType::f32;
  const std::lock_guard lock(rope_table_.mutex);
  Tensor& table = rope_table_.tensor;
  if (table.defined() && table.device() == device && table.dtype() == dtype && serves(table.size(0)))
    return table;
  int64_t positions = std::min(config.positions, std::max(2 * length, int64_t{256}));
  if (!serves(positions)) positions = std::max(length, config.rope.trained_length);
  if (!serves(positions)) positions = length;
  table = ops::rope_table(config.rope, config.rotary(), positions, dtype, device);
  return table;
}

nn::AttentionPass Llama::complete(nn::AttentionPass pass, Device device) const {
  if (!pass.rope_table.defined()) pass.rope_table = rope_table(pass.sequences.longest());
  if (!pass.sequences.is_uniform()) pass.positions = pass.sequences.positions(0, device);
  return pass;
}

nn::AttentionPass Llama::begin(const Tensor& tokens, const nn::Sequences& sequences) const {
  check_texts(tokens, sequences, longest());
  return complete({.sequences = sequences}, tokens.device());
}

Residual Llama::embed(const Tensor& tokens, const nn::AttentionPass&, Site site) const {
  const nn::LayerCall call(*this, site);
  if (ranks.shares()) return {{}, ranks.embed(token, tokens, config.vocabulary)};
  return {dropout(token(tokens)), {}};
}

Residual Llama::block(int64_t i, const Residual& x, const nn::AttentionPass& pass, Site site) const {
  const nn::LayerCall call(*this, site);
  return through_block(blocks, i, x, pass);
}

Tensor Llama::last_norm(const Residual& x) const {
  return stream_norm(ranks, norm, x).y;
}

Tensor Llama::logits(const Tensor& last) const {
  const Tensor own = lm_head(last, token);
  return ranks.shares() ? ranks.gather(own, config.vocabulary) : own;
}

Tensor Llama::finish(const Residual& x, Site site) const {
  const nn::LayerCall call(*this, site);
  return logits(last_norm(x));
}

Tensor Llama::finish(const Residual& x, const Tensor& targets, Site site) const {
  const nn::LayerCall call(*this, site);
  const Tensor last = last_norm(x), flat = flat_targets(name_of(config.family), targets, last.size(0));
  return ranks.shares() ? ops::cross_entropy(logits(last), flat) : lm_head.loss(last, flat, token);
}

Residual Llama::hidden(const Tensor& tokens, const nn::AttentionPass& pass) const {
  return through_blocks(*this, embed(tokens, pass), pass);
}

nn::DecoderLayers Llama::decoder_layers(const nn::KvCache& cache) const {
  std::vector<nn::DecoderBlock> parts;
  for (const LlamaBlock& block : blocks)
    parts.push_back({block.norm1, block.attention, block.norm2, block.mlp, block.dropout});
  return {parts, cache, "blocks"};
}

std::string Llama::persistent_lacks(const nn::KvCache& cache) const {
  if (ranks.shares()) return "the layers are shared out over " + std::to_string(ranks.size()) + " ranks";
  return decoder_layers(cache).lacks();
}

const char* Llama::step_variant(const nn::KvCache& cache) const {
  return persistent_lacks(cache).empty() ? "persistent" : "composed";
}

void Llama::check_texts(const Tensor& tokens, const nn::Sequences& sequences, int64_t most) const {
  const char* const name = name_of(config.family);
  check(config.window == 0 || sequences.longest() <= config.window, name, ": a sequence has ",
        sequences.longest(), " tokens, more than the sliding window of ", config.window,
        "; attention here has no window, so a text must fit into it");
  check_packed(name, tokens, sequences, most);
}

Tensor Llama::operator()(const Tensor& tokens, const nn::Sequences& sequences, Site site) const {
  const nn::LayerCall call(*this, site);
  return finish(hidden(tokens, begin(tokens, sequences)));
}

Tensor Llama::operator()(const Tensor& tokens, Site site) const {
  const nn::LayerCall call(*this, site);
  const Tensor y = (*this)(flat_tokens(name_of(config.family), tokens), sequences_of(tokens));
  return ops::reshape(y, {tokens.size(0), tokens.size(1), config.vocabulary});
}

Tensor Llama::loss(const Tensor& tokens, const Tensor& targets, Site site) const {
  const nn::LayerCall call(*this, site);
  return loss(flat_tokens(name_of(config.family), tokens), targets, sequences_of(tokens));
}

Tensor Llama::loss(const Tensor& tokens, const Tensor& targets, const nn::Sequences& sequences,
                   Site site) const {
  const nn::LayerCall call(*this, site);
  return finish(hidden(tokens, begin(tokens, sequences)), targets);
}

bool Llama::steps_repeat(int64_t capacity) const {
  return ops::rope_same_angles(config.rope, 1, capacity);
}

int64_t Llama::restart_length() const {
  return config.rope.scaling == ops::RopeScaling::longrope ? config.rope.trained_length : kEndless;
}

nn::KvCache Llama::make_cache(int64_t batch, int64_t capacity) const {
  check(config.window == 0 || capacity <= config.window, name_of(config.family), ": a cache of ", capacity,
        " tokens is larger than the sliding window of ", config.window,
        "; attention here has no window, so a text must fit into it");
  check(capacity <= longest(), name_of(config.family), ": a cache of ", capacity, " tokens; the model has ",
        config.positions, " positions");
  nn::KvCache cache(config.layers, batch, capacity, config.kv_heads / ranks.size(),
                    config.effective_head_dim(), config.dtype, token.weight.device());
  if (steps_repeat(capacity)) cache.rope_table = rope_table(capacity);
  return cache;
}

Tensor Llama::prefill(const Tensor& tokens, const nn::Sequences& sequences, nn::KvCache& cache,
                      Site site) const {
  const nn::LayerCall call(*this, site);
  const NoTape no_tape;
  check_texts(tokens, sequences, cache.capacity());
  cache.begin(sequences);
  const auto run = [&] {
    const nn::AttentionPass pass = complete(
        {.sequences = sequences, .rope_table = cache.rope_table, .cache = &cache, .fills_cache = true},
        tokens.device());
    const Residual x = hidden(tokens, pass);
    cache.advance(sequences.longest());
    return finish(x);
  };
  return run_or_undo(run, [&] { cache.truncate(0); });
}

Tensor Llama::step(const Tensor& tokens, nn::KvCache& cache, Site site) const {
  const nn::LayerCall call(*this, site);
  const NoTape no_tape;
  const Tensor flat = flat_tokens(name_of(config.family), tokens);
  const int64_t held = cache.length(), length = held + tokens.size(1);
  check(held > restart_length() || length <= restart_length(), name_of(config.family), ": ", length,
        " tokens are more than the ", restart_length(),
        " that longrope's short factors are for; run the whole text again (prefill), as Generator does");
  const Tensor table = cache.rope_table.defined() ? cache.rope_table : rope_table(length);
  const nn::AttentionPass pass{.sequences = sequences_of(tokens),
                               .rope_table = table,
                               .positions = cache.begin(tokens.size(1)),
                               .cache = &cache};
  if (tokens.size(1) == 1 && !ranks.shares()) {
    if (const nn::DecoderLayers layers = decoder_layers(cache); layers.lacks().empty()) {
      const Tensor x = embed(flat, pass).sum;
      return finish({layers(x, table), {}});
    }
  }
  return finish(last_rows(hidden(flat, pass), pass.sequences));
}

Tensor Llama::decode(const Tensor& tokens, nn::KvCache& cache, Site site) const {
  const nn::LayerCall call(*this, site);
  return language_internal::decode(name_of(config.family), *this, tokens, cache);
}

}  // namespace tessera::models
