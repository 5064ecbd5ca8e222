#pragma once

#include <algorithm>
#include <functional>

#include "models/language.h"
#include "nn/attention.h"
#include "nn/init.h"
#include "nn/prefill_scope.h"

/// What the language models share; not for their users.

namespace tessera::models::language_internal {

using Size = std::pair<const char*, int64_t>;

/// Throws, naming model and size, unless each is 1 or more.
void check_sizes(const char* model, std::initializer_list<Size> sizes);
/// tokens [B, T] as [B T]; throws unless of rank 2 and i64 or i32.
Tensor flat_tokens(const char* model, const Tensor& tokens);
nn::Sequences sequences_of(const Tensor& tokens);  // of [B, T]
/// Throws unless tokens is [N], i64 or i32, with as many as the sequences say, and none longer than `most`.
void check_packed(const char* model, const Tensor& tokens, const nn::Sequences& sequences, int64_t most);
/// Rows of the last token of each of B sequences: [N, d] -> [B, d].
Residual last_rows(const Residual& x, const nn::Sequences& sequences);
/// The norm of what the stream holds with its last branch, and that sum.
template <class Norm>
ops::AddNorm add_norm(const Norm& norm, const Residual& x) {
  return x.branch.defined() ? norm.add(x.sum, x.branch) : ops::AddNorm{x.sum, norm(x.sum)};
}
/// One block of a causal model: what x [N, d] is after it.
template <class Block>
Residual through_block(const std::vector<Block>& blocks, int64_t i, const Residual& x,
                       const nn::AttentionPass& pass) {
  const Block& block = blocks[size_t(i)];
  const nn::PrefillScope texts(pass.cache && !pass.fills_cache ? nullptr : &pass.sequences);
  Residual stream = block.attend(x, pass, i);
  if (!pass.fills_cache || i + 1 < int64_t(blocks.size())) return block.feed(stream);
  // After the last attention only the last token of each prompt is needed.
  const nn::PrefillScope last_tokens(nullptr);
  return block.feed(last_rows(stream, pass.sequences));
}
/// All blocks of a causal model.
template <class Model>
Residual through_blocks(const Model& model, Residual x, const nn::AttentionPass& pass) {
  for (int64_t i = 0; i < model.config.layers; ++i) x = model.block(i, x, pass);
  return x;
}
/// The result of pass(). If that throws, undo() leaves the cache as it was before.
Tensor run_or_undo(const std::function<Tensor()>& pass, const std::function<void()>& undo);
/// Implements Model::decode by its prefill and step: prefill if the cache is empty, else steps of at most
/// kMostNew tokens. If one throws, the cache holds what it held before.
template <class Model>
Tensor decode(const char* name, const Model& model, const Tensor& tokens, nn::KvCache& cache) {
  const Tensor flat = flat_tokens(name, tokens);
  if (cache.length() == 0) return model.prefill(flat, sequences_of(tokens), cache);
  int64_t begin = 0;
  const auto steps = [&] {
    Tensor logits;
    do {
      const int64_t end = std::min(begin + nn::KvCache::kMostNew, tokens.size(1));
      logits = model.step(tokens.slice(1, begin, end), cache);
      cache.advance(end - begin);
      begin = end;
    } while (begin < tokens.size(1));
    return logits;
  };
  return run_or_undo(steps, [&] { cache.take_back(begin); });
}
/// Targets of N elements for `tokens` tokens as [N], or throws.
Tensor flat_targets(const char* model, const Tensor& targets, int64_t tokens);
/// weight = N(0, deviation^2), bias = 0.
void draw(const nn::Linear& linear, const Rng& rng, double deviation);

}  // namespace tessera::models::language_internal
