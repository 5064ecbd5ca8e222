#pragma once

#include <optional>
#include <vector>

#include "models/language.h"
#include "nn/attention.h"
#include "nn/embedding.h"
#include "nn/lm_head.h"
#include "nn/mlp.h"
#include "nn/norm.h"

namespace tessera::models {

/// BERT (Devlin et al., arXiv:1810.04805) and RoBERTa (Liu et al., arXiv:1907.11692): an encoder of whole
/// sequences with a task head. RoBERTa counts positions from pad_token + 1 and has one token type.
///
///   x = dropout(LN(token[t] + type[s] + position[p]))
///   blocks  x = LN(x + dropout(attention(x))),  x = LN(x + dropout(MLP(x)))      every token sees every
///   other heads   of the first token x0 of each sequence, a row:
///     classify, regress  out(dropout(tanh(dense(x0)))); RoBERTa drops x0 as well. Regression is a
///                        classification with one label and the squared error for loss
///     masked_lm          LN(act(dense(x))) token^T + bias, for every token
enum class BertFamily : uint8_t { bert, roberta };
enum class BertHead : uint8_t { none, classify, regress, masked_lm };

struct BertConfig {
  BertFamily family = BertFamily::bert;
  int64_t vocabulary = 30522;
  int64_t positions = 512;  // rows of the position table; RoBERTa: pad_token + 1 of them are not for tokens
  int64_t types = 2;
  int64_t d_model = 768;
  int64_t d_ff = 3072;
  int64_t heads = 12;
  int64_t layers = 12;
  int64_t pad_token = 0;
  ops::Activation activation = ops::Activation::gelu;
  double eps = 1e-12;
  double hidden_dropout = 0, attention_dropout = 0, classifier_dropout = 0;  // while training
  BertHead head = BertHead::none;
  int64_t labels = 2;  // of classify
  double init_deviation = 0.02;
  DType dtype = DType::f32;

  void fields(auto&& visit) {
    visit("family", family), visit("vocabulary", vocabulary), visit("positions", positions);
    visit("types", types), visit("d_model", d_model), visit("d_ff", d_ff), visit("heads", heads);
    visit("layers", layers), visit("pad_token", pad_token), visit("activation", activation);
    visit("eps", eps), visit("hidden_dropout", hidden_dropout);
    visit("attention_dropout", attention_dropout), visit("classifier_dropout", classifier_dropout);
    visit("head", head), visit("labels", labels), visit("init_deviation", init_deviation);
    visit("dtype", dtype);
  }
  int64_t position_offset() const { return family == BertFamily::roberta ? pad_token + 1 : 0; }
  int64_t longest() const { return positions - position_offset(); }
  int64_t outputs() const { return head == BertHead::regress ? 1 : labels; }
  /// Throws, naming the size, unless a model of these sizes can be built.
  void validate() const;
};

/// Packed sequences, without padding.
struct BertBatch {
  Tensor tokens;            // [N], i64 or i32
  Tensor types;             // [N], or undefined: all 0
  nn::Sequences sequences;  // their lengths
  /// The tensors that a pass would otherwise compute from the lengths and copy to the device, which a
  /// captured graph cannot do.
  Tensor positions = {};   // [N] rows of the position table
  Tensor first_rows = {};  // [B] rows that the classifier reads; undefined: the first of every sequence
  Tensor cu_seqlens = {};  // [B + 1], see ops::AttentionSequences: then rows past the last are padding rows,
                           // and `sequences` is not read
  /// [R] different rows that a masked language head reads: the last block computes these alone, and logits
  /// and targets are theirs. Undefined: every row.
  Tensor masked = {};

  /// From rows [B, T] padded at the end and their lengths; on the device of `tokens`, which is read on the
  /// host. `types` [B, T] or undefined.
  static BertBatch from_padded(const Tensor& tokens, const Tensor& types,
                               const std::vector<int64_t>& lengths);
};

struct BertBlock {
  BertBlock(const BertConfig& config, const Rng& rng, Device device);
  /// [N, d] -> [N, d], or [R, d] of the tokens that pass.rows names for this layer; all are attended to.
  Tensor operator()(const Tensor& x, const nn::AttentionPass& pass, int64_t layer = 0,
                    Site site = Site::here()) const;
  void fields(auto&& visit) {
    visit("attention", attention), visit("norm1", norm1), visit("mlp", mlp), visit("norm2", norm2);
    visit("dropout", dropout);
  }
  nn::LayerName layer_name;  // for messages

  nn::SelfAttention attention;
  nn::LayerNorm norm1;
  nn::Mlp mlp;
  nn::LayerNorm norm2;
  nn::Dropout dropout;
};

struct BertClassifier {
  BertClassifier(const BertConfig& config, const Rng& rng, Device device);
  Tensor operator()(const Tensor& first, Site site = Site::here()) const;  // [B, d] -> [B, labels]
  void fields(auto&& visit) { visit("dense", dense), visit("out", out), visit("dropout", dropout); }
  nn::LayerName layer_name;  // for messages

  nn::Linear dense, out;
  nn::Dropout dropout;
  bool drops_input;
};

struct BertLanguageHead {
  BertLanguageHead(const BertConfig& config, const Rng& rng, Device device);
  Tensor operator()(const Tensor& x, const nn::Embedding& token,
                    Site site = Site::here()) const;  // [N, d] -> [N, V]
  Tensor loss(const Tensor& x, const Tensor& targets, const nn::Embedding& token,
              Site site = Site::here()) const;
  void fields(auto&& visit) { visit("dense", dense), visit("norm", norm), visit("", decoder); }
  nn::LayerName layer_name;  // for messages

  nn::Linear dense;
  nn::LayerNorm norm;
  nn::LmHead decoder;  // tied, with a bias [V]
  ops::Activation activation;
};

struct Bert {
  /// `rng` draws the initial values and later the dropout masks.
  Bert(const BertConfig& config, const Rng& rng, Device device, Start start = Start::drawn);

  /// Hidden states of every token after the last block: [N, d].
  Tensor encode(const BertBatch& batch, Site site = Site::here()) const;
  /// Hidden states of the first token of every sequence after the last block: [B, d]. The last block does not
  /// compute the others.
  Tensor encode_first(const BertBatch& batch, Site site = Site::here()) const;
  /// Output of the head: [B, labels] of classify, [B, 1] of regress, [N, V] of masked_lm ([R, V] with
  /// batch.masked), and encode's of none.
  Tensor operator()(const BertBatch& batch, Site site = Site::here()) const;
  /// classify: mean cross-entropy of targets [B] (i64 or i32). regress: mean squared error of targets [B],
  /// floating. masked_lm: mean cross-entropy of targets [N], or [R] with batch.masked, -100 where nothing was
  /// masked; the logits never exist as a whole (nn::LmHead::loss). none: throws.
  Tensor loss(const BertBatch& batch, const Tensor& targets, Site site = Site::here()) const;

  /// The stages of a pass, of which these are composed: begin, embed, each block in turn, finish.
  /// begin: what all blocks share. If `first_alone`, the last block computes the first tokens alone, as a
  /// classifier reads them. Throws unless the batch fits together.
  nn::AttentionPass begin(const BertBatch& batch, bool first_alone) const;
  /// As the head needs it.
  nn::AttentionPass begin(const BertBatch& batch) const;
  Tensor embed(const BertBatch& batch, Site site = Site::here()) const;  // [N, d]
  Tensor block(int64_t i, const Tensor& x, const nn::AttentionPass& pass, Site site = Site::here()) const;
  /// The last block's output -> the head's output, see operator().
  Tensor finish(const Tensor& x, Site site = Site::here()) const;
  /// The same -> the loss, see loss.
  Tensor finish(const Tensor& x, const Tensor& targets, Site site = Site::here()) const;

  void fields(auto&& visit) {
    visit("token", token), visit("position", position), visit("type", type), visit("norm", norm);
    visit("blocks", blocks), visit("classifier", classifier), visit("language", language);
    visit("dropout", dropout);
  }
  nn::LayerName layer_name;  // for messages

  BertConfig config;
  nn::Embedding token, position, type;
  nn::LayerNorm norm;
  std::vector<BertBlock> blocks;
  std::optional<BertClassifier> classifier;
  std::optional<BertLanguageHead> language;
  nn::Dropout dropout;

 private:
  Tensor through_blocks(const BertBatch& batch, const nn::AttentionPass& pass) const;
};

}  // namespace tessera::models
