#pragma once

#include <mutex>
#include <string_view>
#include <vector>

#include "models/language.h"
#include "nn/attention.h"
#include "nn/decoder_layers.h"
#include "nn/embedding.h"
#include "nn/lm_head.h"
#include "nn/mlp.h"
#include "nn/norm.h"
#include "nn/tensor_parallel.h"
#include "ops/rope/rope_table.h"

namespace tessera::models {

/// LLaMA 1, 2 and 3 (Touvron et al., arXiv:2302.13971 and 2307.09288; Grattafiori et al., arXiv:2407.21783)
/// and the decoders of its shape, which differ in a few settings of the family:
///   mistral  Jiang et al., arXiv:2310.06825: a sliding window
///   qwen2    Yang et al., arXiv:2407.10671: biases of q, k and v; a sliding window
///   qwen3    Yang et al., arXiv:2505.09388: RMSNorm of each head of q and k; a sliding window
///   phi3     Abdin et al., arXiv:2404.14219: partial rotation, a sliding window; in its files q, k and v
///            are one matrix, and so are gate and up
///   arcee    Arcee AI's AFM-4.5B (transformers' arcee): a feed-forward network without a gate, with the
///            squared ReLU of So et al., arXiv:2109.08668
enum class LlamaFamily : uint8_t { llama, mistral, qwen2, qwen3, phi3, arcee };

const char* name_of(LlamaFamily family);                // "qwen2": the model_type of transformers
LlamaFamily parse_llama_family(std::string_view name);  // throws, naming the choices

///   x = dropout(token[t])
///   blocks  x = x + dropout(attention(RMSNorm(x))),  x = x + dropout(FFN(RMSNorm(x)))
///           causal; queries and keys rotated by their positions (ops::rope), after qwen3's norms; kv_heads
///           may be fewer than heads
///           FFN gated:  down(act(gate) up), gate and up from one product; with SiLU this is ops::swiglu
///           FFN plain:  down(act(up)), as with the squared ReLU of Haziza et al., arXiv:2503.16672
///   logits = lm_head(RMSNorm(x)), the LM head being the token table if `tied`
struct LlamaConfig {
  LlamaFamily family = LlamaFamily::llama;
  int64_t vocabulary = 32000;
  int64_t positions = 4096;  // longest sequence; with dynamic scaling there is no limit
  int64_t d_model = 4096;
  int64_t d_ff = 11008;
  int64_t heads = 32;
  int64_t kv_heads = 32;
  int64_t head_dim = 0;  // 0: d_model / heads
  int64_t layers = 32;
  double eps = 1e-5;
  ops::RopeOptions rope = {};
  double partial_rotary = 1;  // share of a head's elements, from its first on, that positions rotate; phi3
  /// Keys that a token sees, its own included; 0: all. Attention here has no window, so longer texts are
  /// refused. Not in llama and arcee.
  int64_t window = 0;
  /// Number of first layers without the window, less than `layers`; qwen2 and qwen3. It is for config.json:
  /// texts that are no longer than the window see all keys in every layer.
  int64_t full_layers = 0;
  ops::Activation activation = ops::Activation::silu;
  bool gated = true;
  bool attention_bias = false;  // of q, k, v and the output projection; llama, qwen3 and arcee
  bool mlp_bias = false;        // llama and arcee
  // While training. A config.json has a field for that of attention alone, but phi3's for all three.
  double embedding_dropout = 0, attention_dropout = 0, residual_dropout = 0;
  bool tied = false;
  double init_deviation = 0.02;  // every matrix starts as N(0, init_deviation^2)
  DType dtype = DType::f32;

  void fields(auto&& visit) {
    visit("family", family), visit("vocabulary", vocabulary), visit("positions", positions);
    visit("d_model", d_model), visit("d_ff", d_ff), visit("heads", heads), visit("kv_heads", kv_heads);
    visit("head_dim", head_dim), visit("layers", layers), visit("eps", eps), visit("rope", rope);
    visit("partial_rotary", partial_rotary), visit("window", window);
    visit("full_layers", full_layers), visit("activation", activation), visit("gated", gated);
    visit("attention_bias", attention_bias), visit("mlp_bias", mlp_bias);
    visit("embedding_dropout", embedding_dropout), visit("attention_dropout", attention_dropout);
    visit("residual_dropout", residual_dropout), visit("tied", tied);
    visit("init_deviation", init_deviation), visit("dtype", dtype);
  }
  int64_t effective_head_dim() const { return head_dim ? head_dim : d_model / heads; }
  int64_t rotary() const {
    return int64_t(double(effective_head_dim()) * partial_rotary);
  }  // elements of a head
  bool qkv_bias() const { return attention_bias || family == LlamaFamily::qwen2; }
  bool qk_norm() const { return family == LlamaFamily::qwen3; }
  /// Tokens of the longest text: as far as positions and window reach. With dynamic scaling positions do not
  /// end.
  int64_t longest() const;
  /// Throws, naming the size or the setting, unless a model of this family can be built so.
  void validate() const;
  /// What one of so many ranks holds: its heads, hidden features and rows of the vocabulary
  /// (nn::TensorParallel). Throws, naming the size, where the ranks do not divide it.
  LlamaConfig share(int ranks) const;
};

struct LlamaBlock {
  /// `config`: of a rank's share.
  LlamaBlock(const LlamaConfig& config, const Rng& rng, Device device, const nn::TensorParallel& ranks = {});
  Residual attend(const Residual& x, const nn::AttentionPass& pass, int64_t layer,
                  Site site = Site::here()) const;
  Residual feed(const Residual& x, Site site = Site::here()) const;
  void fields(auto&& visit) {
    visit("norm1", norm1), visit("attention", attention), visit("norm2", norm2), visit("mlp", mlp);
    visit("dropout", dropout);
  }
  nn::LayerName layer_name;  // for messages

  nn::RmsNorm norm1;
  nn::SelfAttention attention;
  nn::RmsNorm norm2;
  nn::Mlp mlp;
  nn::Dropout dropout;
  nn::TensorParallel ranks;
};

struct Llama {
  /// `rng` draws the initial values and later the dropout masks. With several `ranks`, each of which makes
  /// the model, it holds this rank's share of the weights, blank, and is for inference; what its functions
  /// take and return is of the whole model, and the same on all ranks.
  Llama(const LlamaConfig& config, const Rng& rng, Device device, Start start = Start::drawn,
        const nn::TensorParallel& ranks = {});

  /// As those of Gpt.
  Tensor operator()(const Tensor& tokens, Site site = Site::here()) const;
  Tensor operator()(const Tensor& tokens, const nn::Sequences& sequences, Site site = Site::here()) const;
  Tensor loss(const Tensor& tokens, const Tensor& targets, Site site = Site::here()) const;
  Tensor loss(const Tensor& tokens, const Tensor& targets, const nn::Sequences& sequences,
              Site site = Site::here()) const;
  nn::AttentionPass begin(const Tensor& tokens, const nn::Sequences& sequences) const;
  Residual embed(const Tensor& tokens, const nn::AttentionPass& pass, Site site = Site::here()) const;
  Residual block(int64_t i, const Residual& x, const nn::AttentionPass& pass, Site site = Site::here()) const;
  Tensor finish(const Residual& x, Site site = Site::here()) const;
  Tensor finish(const Residual& x, const Tensor& targets, Site site = Site::here()) const;
  int64_t longest() const { return config.longest(); }
  nn::KvCache make_cache(int64_t batch, int64_t capacity) const;
  Tensor prefill(const Tensor& tokens, const nn::Sequences& sequences, nn::KvCache& cache,
                 Site site = Site::here()) const;
  Tensor decode(const Tensor& tokens, nn::KvCache& cache, Site site = Site::here()) const;
  Tensor step(const Tensor& tokens, nn::KvCache& cache, Site site = Site::here()) const;
  bool steps_repeat(int64_t capacity) const;  // not if its angles change with the length
  /// A text that outgrows this length must be run again from its first token, because longrope rotates all
  /// tokens of a longer text by other angles. `step` throws where it would cross it. Other models: kEndless.
  int64_t restart_length() const;
  /// How a step over this cache runs: "persistent" (ops::decoder_layers in one kernel) or "composed".
  const char* step_variant(const nn::KvCache& cache) const;
  /// Why a step over this cache is not persistent, naming the layer if one prevents it; empty if it is.
  std::string persistent_lacks(const nn::KvCache& cache) const;

  void fields(auto&& visit) {
    visit("token", token), visit("blocks", blocks), visit("norm", norm), visit("lm_head", lm_head);
    visit("dropout", dropout);
  }
  nn::LayerName layer_name;  // for messages

  LlamaConfig config;  // of the whole model
  nn::TensorParallel ranks;
  nn::Embedding token;
  std::vector<LlamaBlock> blocks;
  nn::RmsNorm norm;
  nn::LmHead lm_head;
  nn::Dropout dropout;

 private:
  Llama(const LlamaConfig& config, const LlamaConfig& share, const Rng& rng, Device device, Start start,
        const nn::TensorParallel& ranks);
  /// The last norm, and the logits.
  Tensor last_norm(const Residual& x) const;
  Tensor logits(const Tensor& last) const;
  /// The final residual stream: of all tokens, or, where a cache is filled, of the last of each
  /// sequence.
  Residual hidden(const Tensor& tokens, const nn::AttentionPass& pass) const;
  /// The pass with the table and the positions that it lacks.
  nn::AttentionPass complete(nn::AttentionPass pass, Device device) const;
  nn::DecoderLayers decoder_layers(const nn::KvCache& cache) const;
  /// Throws unless tokens [N] are those of the sequences, none of which is longer than `most` or the window.
  void check_texts(const Tensor& tokens, const nn::Sequences& sequences, int64_t most) const;
  /// The table for sequences of `length` tokens: the one at hand if it serves, else a new one, longer where
  /// the angles are those of longer sequences (so that a growing one seldom makes a table). Made on the host:
  /// not while a graph is being captured.
  Tensor rope_table(int64_t length) const;

  /// The table at hand, under its mutex, since threads may call one model at once. A copy of a model has
  /// none.
  struct RopeTable {
    RopeTable() = default;
    RopeTable(const RopeTable&) {}
    RopeTable& operator=(const RopeTable&) {
      tensor = {};
      return *this;
    }

    std::mutex mutex;
    Tensor tensor;
  };
  mutable RopeTable rope_table_;
};

}  // namespace tessera::models
