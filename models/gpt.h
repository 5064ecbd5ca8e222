#pragma once

#include <vector>

#include "models/language.h"
#include "nn/attention.h"
#include "nn/embedding.h"
#include "nn/lm_head.h"
#include "nn/mlp.h"
#include "nn/norm.h"

namespace tessera::models {

/// GPT-2 (Radford et al., "Language Models are Unsupervised Multitask Learners", 2019) and OPT (Zhang et al.,
/// arXiv:2205.01068), which differ in the activation, the initialisation and where positions begin.
///
///   x = dropout(token[t] + position[t])
///   blocks  x = x + dropout(attention(LN(x))),  x = x + dropout(MLP(LN(x)))      causal
///   logits = LN(x) token^T, or a separate matrix unless `tied`
enum class GptFamily : uint8_t { gpt2, opt };

struct GptConfig {
  GptFamily family = GptFamily::gpt2;
  int64_t vocabulary = 50257;
  int64_t positions = 1024;  // longest sequence
  int64_t d_model = 768;
  int64_t d_ff = 3072;
  int64_t heads = 12;
  int64_t layers = 12;
  ops::Activation activation = ops::Activation::gelu_tanh;
  double eps = 1e-5;
  double embedding_dropout = 0, attention_dropout = 0, residual_dropout = 0;  // while training
  bool tied = true;
  // N(0, init_deviation^2); of projections onto the residual, divided by sqrt(2 layers) (GPT-2, section 2.3).
  double init_deviation = 0.02;
  DType dtype = DType::f32;

  void fields(auto&& visit) {
    visit("family", family), visit("vocabulary", vocabulary), visit("positions", positions);
    visit("d_model", d_model), visit("d_ff", d_ff), visit("heads", heads), visit("layers", layers);
    visit("activation", activation), visit("eps", eps), visit("embedding_dropout", embedding_dropout);
    visit("attention_dropout", attention_dropout), visit("residual_dropout", residual_dropout);
    visit("tied", tied), visit("init_deviation", init_deviation), visit("dtype", dtype);
  }
  /// Rows of the position table before that of position 0: OPT's has two unused ones.
  int64_t position_offset() const { return family == GptFamily::opt ? 2 : 0; }
  /// Throws, naming the size, unless a model of these sizes can be built.
  void validate() const;
};

struct GptBlock {
  GptBlock(const GptConfig& config, const Rng& rng, Device device);
  /// The two halves, each a branch. The second works token by token.
  Residual attend(const Residual& x, const nn::AttentionPass& pass, int64_t layer,
                  Site site = Site::here()) const;
  Residual feed(const Residual& x, Site site = Site::here()) const;
  void fields(auto&& visit) {
    visit("norm1", norm1), visit("attention", attention), visit("norm2", norm2), visit("mlp", mlp);
    visit("dropout", dropout);
  }
  nn::LayerName layer_name;  // for messages

  nn::LayerNorm norm1;
  nn::SelfAttention attention;
  nn::LayerNorm norm2;
  nn::Mlp mlp;
  nn::Dropout dropout;
};

struct Gpt {
  /// `rng` draws the initial values and later the dropout masks.
  Gpt(const GptConfig& config, const Rng& rng, Device device, Start start = Start::drawn);

  /// tokens [B, T] (i64 or i32) -> logits [B, T, V].
  Tensor operator()(const Tensor& tokens, Site site = Site::here()) const;
  /// Packed sequences of any lengths: tokens [N] -> logits [N, V].
  Tensor operator()(const Tensor& tokens, const nn::Sequences& sequences, Site site = Site::here()) const;
  /// Mean cross-entropy in nats of targets (of the shape of tokens): the token that follows, or -100 where
  /// none is to be predicted.
  Tensor loss(const Tensor& tokens, const Tensor& targets, Site site = Site::here()) const;
  Tensor loss(const Tensor& tokens, const Tensor& targets, const nn::Sequences& sequences,
              Site site = Site::here()) const;

  /// The stages of a pass, of which operator() and loss are composed: begin, embed, each block in turn,
  /// finish. begin: what all blocks share. Throws unless tokens [N] are those of the sequences.
  nn::AttentionPass begin(const Tensor& tokens, const nn::Sequences& sequences) const;
  /// tokens [N] -> [N, d]
  Residual embed(const Tensor& tokens, const nn::AttentionPass& pass, Site site = Site::here()) const;
  Residual block(int64_t i, const Residual& x, const nn::AttentionPass& pass, Site site = Site::here()) const;
  /// The last block's output -> logits [N, V].
  Tensor finish(const Residual& x, Site site = Site::here()) const;
  /// The same -> the mean cross-entropy of targets [N].
  Tensor finish(const Residual& x, const Tensor& targets, Site site = Site::here()) const;

  int64_t longest() const { return config.positions; }  // sequence
  nn::KvCache make_cache(int64_t batch, int64_t capacity) const;
  /// Packed sequences of any lengths, tokens [N], into an empty cache -> logits [B, V] after the
  /// last token of each. One sequence may stand for all of the cache. If it throws, the cache is empty
  /// again. Records nothing, as the next two.
  Tensor prefill(const Tensor& tokens, const nn::Sequences& sequences, nn::KvCache& cache,
                 Site site = Site::here()) const;
  /// tokens [B, n], the next n of each sequence -> logits [B, V] after the last of them. If it throws, the
  /// cache holds what it held before.
  Tensor decode(const Tensor& tokens, nn::KvCache& cache, Site site = Site::here()) const;
  /// The same for n <= KvCache::kMostNew, without cache.advance(n): the part of it that a graph replays.
  Tensor step(const Tensor& tokens, nn::KvCache& cache, Site site = Site::here()) const;
  /// Whether every decode step over a cache of that capacity is the same work, so that a graph can replay it.
  bool steps_repeat(int64_t capacity) const;
  /// A text that outgrows this length must be re-run from its first token: never, for this model.
  int64_t restart_length() const { return kEndless; }
  const char* step_variant(const nn::KvCache&) const { return "composed"; }

  void fields(auto&& visit) {
    visit("token", token), visit("position", position), visit("blocks", blocks), visit("norm", norm);
    visit("lm_head", lm_head), visit("dropout", dropout);
  }
  nn::LayerName layer_name;  // for messages

  GptConfig config;
  nn::Embedding token, position;
  std::vector<GptBlock> blocks;
  nn::LayerNorm norm;
  nn::LmHead lm_head;
  nn::Dropout dropout;

 private:
  /// The final residual stream: of all tokens, or, where a cache is filled, of the last of each
  /// sequence.
  Residual hidden(const Tensor& tokens, const nn::AttentionPass& pass) const;
};

}  // namespace tessera::models
