#include "models/gpt.h"

#include <cmath>

#include "models/language_internal.h"
#include "ops/embedding/embedding.h"
#include "ops/pointwise/pointwise.h"
#include "ops/shape/shape.h"

namespace tessera::models {

using namespace language_internal;

void GptConfig::validate() const {
  check_sizes("gpt", {{"vocabulary", vocabulary},
                      {"positions", positions},
                      {"d_model", d_model},
                      {"d_ff", d_ff},
                      {"heads", heads},
                      {"layers", layers}});
  check(d_model % heads == 0, "gpt: d_model ", d_model, " is not a multiple of the number of heads ", heads);
}

namespace {

const GptConfig& validated(const GptConfig& config) {
  config.validate();
  return config;
}

nn::LayerNormOptions norm_options(const GptConfig& config) {
  return {.eps = config.eps, .dtype = config.dtype};
}

}  // namespace

GptBlock::GptBlock(const GptConfig& config, const Rng& rng, Device device)
    : norm1(config.d_model, device, norm_options(config)),
      attention(config.d_model, rng, device,
                {.heads = config.heads,
                 .causal = true,
                 .dropout = config.attention_dropout,
                 .dtype = config.dtype,
                 .init = nn::Init::zeros}),
      norm2(config.d_model, device, norm_options(config)),
      mlp(config.d_model, config.d_ff, rng, device,
          {.activation = config.activation, .dtype = config.dtype, .init = nn::Init::zeros}),
      dropout(config.residual_dropout, rng) {}

Residual GptBlock::attend(const Residual& x, const nn::AttentionPass& pass, int64_t layer, Site site) const {
  const nn::LayerCall call(*this, site);
  const auto [sum, normed] = add_norm(norm1, x);
  return {sum, dropout(attention(normed, pass, layer))};
}

Residual GptBlock::feed(const Residual& x, Site site) const {
  const nn::LayerCall call(*this, site);
  const auto [sum, normed] = norm2.add(x.sum, x.branch);
  return {sum, dropout(mlp(normed))};
}

Gpt::Gpt(const GptConfig& given, const Rng& rng, Device device, Start start)
    : config(validated(given)),
      token(config.vocabulary, config.d_model, rng, device, {.deviation = 0, .dtype = config.dtype}),
      position(config.positions + config.position_offset(), config.d_model, rng, device,
               {.deviation = 0, .dtype = config.dtype}),
      norm(config.d_model, device, norm_options(config)),
      lm_head(config.d_model, config.vocabulary, rng, device,
              {.tied = config.tied, .dtype = config.dtype, .init = nn::Init::zeros}),
      dropout(config.embedding_dropout, rng) {
  for (int64_t i = 0; i < config.layers; ++i) blocks.emplace_back(config, rng, device);
  if (start == Start::blank) return;
  const double deviation = config.init_deviation,
               onto_residual = deviation / std::sqrt(2 * double(config.layers));
  nn::init::normal(token.weight, rng, 0, deviation);
  nn::init::normal(position.weight, rng, 0, deviation);
  for (const GptBlock& block : blocks) {
    draw(block.attention.qkv, rng, deviation);
    draw(block.attention.out, rng, onto_residual);
    draw(block.mlp.up, rng, deviation);
    draw(block.mlp.down, rng, onto_residual);
  }
  if (!lm_head.tied()) draw(lm_head.out, rng, deviation);
}

nn::AttentionPass Gpt::begin(const Tensor& tokens, const nn::Sequences& sequences) const {
  check_packed("gpt", tokens, sequences, config.positions);
  return {.sequences = sequences};
}

Residual Gpt::embed(const Tensor& tokens, const nn::AttentionPass& pass, Site site) const {
  const nn::LayerCall call(*this, site);
  const int64_t first = config.position_offset(), count = pass.sequences.count();
  const Tensor words = token(tokens);
  Tensor x;
  if (pass.positions.defined()) {
    const Tensor rows = ops::slice(position.weight, 0, first, position.weight.size(0));
    const Tensor places = pass.positions.detach().reshape({tokens.size(0)});
    x = ops::add(words, ops::embedding(rows, places));
  } else if (pass.sequences.is_uniform()) {
    const int64_t length = count ? tokens.size(0) / count : 0;
    const Tensor places = ops::slice(position.weight, 0, first, first + length);
    x = ops::reshape(ops::add(ops::reshape(words, {count, length, config.d_model}), places), words.shape());
  } else {
    x = ops::add(words, position(pass.sequences.positions(first, tokens.device())));
  }
  return {dropout(x), {}};
}

Residual Gpt::block(int64_t i, const Residual& x, const nn::AttentionPass& pass, Site site) const {
  const nn::LayerCall call(*this, site);
  return through_block(blocks, i, x, pass);
}

Tensor Gpt::finish(const Residual& x, Site site) const {
  const nn::LayerCall call(*this, site);
  return lm_head(add_norm(norm, x).y, token);
}

Tensor Gpt::finish(const Residual& x, const Tensor& targets, Site site) const {
  const nn::LayerCall call(*this, site);
  const Tensor last = add_norm(norm, x).y;
  return lm_head.loss(last, flat_targets("gpt", targets, last.size(0)), token);
}

Residual Gpt::hidden(const Tensor& tokens, const nn::AttentionPass& pass) const {
  return through_blocks(*this, embed(tokens, pass), pass);
}

Tensor Gpt::operator()(const Tensor& tokens, const nn::Sequences& sequences, Site site) const {
  const nn::LayerCall call(*this, site);
  return finish(hidden(tokens, begin(tokens, sequences)));
}

Tensor Gpt::operator()(const Tensor& tokens, Site site) const {
  const nn::LayerCall call(*this, site);
  const Tensor flat = flat_tokens("gpt", tokens);
  const Tensor y = (*this)(flat, sequences_of(tokens));
  return ops::reshape(y, {tokens.size(0), tokens.size(1), config.vocabulary});
}

Tensor Gpt::loss(const Tensor& tokens, const Tensor& targets, Site site) const {
  const nn::LayerCall call(*this, site);
  return loss(flat_tokens("gpt", tokens), targets, sequences_of(tokens));
}

Tensor Gpt::loss(const Tensor& tokens, const Tensor& targets, const nn::Sequences& sequences,
                 Site site) const {
  const nn::LayerCall call(*this, site);
  return finish(hidden(tokens, begin(tokens, sequences)), targets);
}

nn::KvCache Gpt::make_cache(int64_t batch, int64_t capacity) const {
  check(capacity <= config.positions, "gpt: a cache of ", capacity, " tokens; the model has ",
        config.positions, " positions");
  return {config.layers,        batch, capacity, config.heads, config.d_model / config.heads, config.dtype,
          token.weight.device()};
}

bool Gpt::steps_repeat(int64_t) const {
  return true;
}

Tensor Gpt::prefill(const Tensor& tokens, const nn::Sequences& sequences, nn::KvCache& cache,
                    Site site) const {
  const nn::LayerCall call(*this, site);
  const NoTape no_tape;
  check_packed("gpt", tokens, sequences, cache.capacity());
  cache.begin(sequences);
  const auto pass = [&] {
    const Residual x = hidden(tokens, {.sequences = sequences, .cache = &cache, .fills_cache = true});
    cache.advance(sequences.longest());
    return finish(x);
  };
  return run_or_undo(pass, [&] { cache.truncate(0); });
}

Tensor Gpt::step(const Tensor& tokens, nn::KvCache& cache, Site site) const {
  const nn::LayerCall call(*this, site);
  const NoTape no_tape;
  const nn::AttentionPass pass{
      .sequences = sequences_of(tokens), .positions = cache.begin(tokens.size(1)), .cache = &cache};
  return finish(last_rows(hidden(flat_tokens("gpt", tokens), pass), pass.sequences));
}

Tensor Gpt::decode(const Tensor& tokens, nn::KvCache& cache, Site site) const {
  const nn::LayerCall call(*this, site);
  return language_internal::decode("gpt", *this, tokens, cache);
}

}  // namespace tessera::models
