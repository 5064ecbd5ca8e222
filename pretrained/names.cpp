#include "pretrained/names.h"

namespace tessera::pretrained {
namespace {

using models::BertFamily;
using models::BertHead;
using models::GptFamily;

/// Adds rules under two prefixes, which a loop over layers changes.
class Writer {
 public:
  explicit Writer(NameTable& table) : table_(table) {}
  void at(std::string ours, std::string theirs) {
    ours_ = std::move(ours);
    theirs_ = std::move(theirs);
  }
  void add(const char* ours, const char* theirs, const Shape& shape) {
    table_.rules.push_back({ours_ + ours, {{theirs_ + theirs, shape}}});
  }
  void add_transposed(const char* ours, const char* theirs, const Shape& shape) {
    add(ours, theirs, shape);
    table_.rules.back().transposed = true;
  }
  struct Rows {
    const char* theirs;
    int64_t count;
  };
  /// Weight, and bias if there is one, of a product made of several: rows [count, in] each.
  void add_linear(const char* ours, std::initializer_list<Rows> parts, int64_t in, bool bias) {
    const std::string name = ours_ + ours;
    NameRule weight{name + ".weight"}, shift{name + ".bias"};
    for (const Rows& part : parts) {
      weight.parts.push_back({theirs_ + part.theirs + ".weight", {part.count, in}});
      shift.parts.push_back({theirs_ + part.theirs + ".bias", {part.count}});
    }
    table_.rules.push_back(std::move(weight));
    if (bias) table_.rules.push_back(std::move(shift));
  }
  void add_norm(const char* ours, const char* theirs, int64_t width, bool bias = true) {
    const std::string own = ours, other = theirs;
    add((own + ".weight").c_str(), (other + ".weight").c_str(), {width});
    if (bias) add((own + ".bias").c_str(), (other + ".bias").c_str(), {width});
  }
  void mark_head(size_t first) {
    for (size_t i = first; i < table_.rules.size(); ++i) table_.rules[i].is_head = true;
  }

 private:
  NameTable& table_;
  std::string ours_, theirs_;
};

std::string block(int64_t layer) {
  return "blocks." + std::to_string(layer) + ".";
}

NameTable gpt2(const models::GptConfig& c) {
  NameTable table{.prefix = "transformer.", .buffers = {".attn.bias", ".attn.masked_bias"}};
  Writer w(table);
  w.at("", "transformer.");
  w.add("token.weight", "wte.weight", {c.vocabulary, c.d_model});
  w.add("position.weight", "wpe.weight", {c.positions, c.d_model});
  w.add_norm("norm", "ln_f", c.d_model);
  for (int64_t i = 0; i < c.layers; ++i) {
    w.at(block(i), "transformer.h." + std::to_string(i) + ".");
    w.add_norm("norm1", "ln_1", c.d_model);
    w.add_transposed("attention.qkv.weight", "attn.c_attn.weight", {c.d_model, 3 * c.d_model});
    w.add("attention.qkv.bias", "attn.c_attn.bias", {3 * c.d_model});
    w.add_transposed("attention.out.weight", "attn.c_proj.weight", {c.d_model, c.d_model});
    w.add("attention.out.bias", "attn.c_proj.bias", {c.d_model});
    w.add_norm("norm2", "ln_2", c.d_model);
    w.add_transposed("mlp.up.weight", "mlp.c_fc.weight", {c.d_model, c.d_ff});
    w.add("mlp.up.bias", "mlp.c_fc.bias", {c.d_ff});
    w.add_transposed("mlp.down.weight", "mlp.c_proj.weight", {c.d_ff, c.d_model});
    w.add("mlp.down.bias", "mlp.c_proj.bias", {c.d_model});
  }
  return table;
}

NameTable opt(const models::GptConfig& c) {
  NameTable table{.prefix = "model."};
  Writer w(table);
  w.at("", "model.decoder.");
  w.add("token.weight", "embed_tokens.weight", {c.vocabulary, c.d_model});
  w.add("position.weight", "embed_positions.weight", {c.positions + c.position_offset(), c.d_model});
  w.add_norm("norm", "final_layer_norm", c.d_model);
  for (int64_t i = 0; i < c.layers; ++i) {
    w.at(block(i), "model.decoder.layers." + std::to_string(i) + ".");
    w.add_norm("norm1", "self_attn_layer_norm", c.d_model);
    w.add_linear(
        "attention.qkv",
        {{"self_attn.q_proj", c.d_model}, {"self_attn.k_proj", c.d_model}, {"self_attn.v_proj", c.d_model}},
        c.d_model, true);
    w.add_linear("attention.out", {{"self_attn.out_proj", c.d_model}}, c.d_model, true);
    w.add_norm("norm2", "final_layer_norm", c.d_model);
    w.add_linear("mlp.up", {{"fc1", c.d_ff}}, c.d_model, true);
    w.add_linear("mlp.down", {{"fc2", c.d_model}}, c.d_ff, true);
  }
  return table;
}

}  // namespace

NameTable name_table(const models::GptConfig& c) {
  NameTable table = c.family == GptFamily::opt ? opt(c) : gpt2(c);
  if (c.tied)
    table.tied = {"lm_head.weight"};
  else
    table.rules.push_back({"lm_head.weight", {{"lm_head.weight", {c.vocabulary, c.d_model}}}});
  return table;
}

NameTable name_table(const models::LlamaConfig& c) {
  NameTable table{.prefix = "model.", .buffers = {".rotary_emb.inv_freq"}};
  const int64_t q = c.heads * c.effective_head_dim(), kv = c.kv_heads * c.effective_head_dim();
  const bool fused =
      c.family == models::LlamaFamily::phi3;  // its files fuse these matrices as this model does
  Writer w(table);
  w.at("", "model.");
  w.add("token.weight", "embed_tokens.weight", {c.vocabulary, c.d_model});
  w.add_norm("norm", "norm", c.d_model, false);
  for (int64_t i = 0; i < c.layers; ++i) {
    w.at(block(i), "model.layers." + std::to_string(i) + ".");
    w.add_norm("norm1", "input_layernorm", c.d_model, false);
    if (fused)
      w.add_linear("attention.qkv", {{"self_attn.qkv_proj", q + 2 * kv}}, c.d_model, c.qkv_bias());
    else
      w.add_linear("attention.qkv",
                   {{"self_attn.q_proj", q}, {"self_attn.k_proj", kv}, {"self_attn.v_proj", kv}}, c.d_model,
                   c.qkv_bias());
    if (c.qk_norm()) {
      w.add_norm("attention.q_norm", "self_attn.q_norm", c.effective_head_dim(), false);
      w.add_norm("attention.k_norm", "self_attn.k_norm", c.effective_head_dim(), false);
    }
    w.add_linear("attention.out", {{"self_attn.o_proj", c.d_model}}, q, c.attention_bias);
    w.add_norm("norm2", "post_attention_layernorm", c.d_model, false);
    if (fused)
      w.add_linear("mlp.up", {{"mlp.gate_up_proj", 2 * c.d_ff}}, c.d_model, c.mlp_bias);
    else if (c.gated)
      w.add_linear("mlp.up", {{"mlp.gate_proj", c.d_ff}, {"mlp.up_proj", c.d_ff}}, c.d_model, c.mlp_bias);
    else
      w.add_linear("mlp.up", {{"mlp.up_proj", c.d_ff}}, c.d_model, c.mlp_bias);
    w.add_linear("mlp.down", {{"mlp.down_proj", c.d_model}}, c.d_ff, c.mlp_bias);
  }
  if (c.tied)
    table.tied = {"lm_head.weight"};
  else
    table.rules.push_back({"lm_head.weight", {{"lm_head.weight", {c.vocabulary, c.d_model}}}});
  return table;
}

NameTable name_table(const models::BertConfig& c) {
  const bool roberta = c.family == BertFamily::roberta;
  const std::string base = roberta ? "roberta." : "bert.";
  NameTable table{.prefix = base,
                  .buffers = {"embeddings.position_ids", "embeddings.token_type_ids"},
                  .others = {"cls.", "lm_head.", "classifier.", "qa_outputs.", base + "pooler."}};
  Writer w(table);
  w.at("", base + "embeddings.");
  w.add("token.weight", "word_embeddings.weight", {c.vocabulary, c.d_model});
  w.add("position.weight", "position_embeddings.weight", {c.positions, c.d_model});
  w.add("type.weight", "token_type_embeddings.weight", {c.types, c.d_model});
  w.add_norm("norm", "LayerNorm", c.d_model);
  for (int64_t i = 0; i < c.layers; ++i) {
    w.at(block(i), base + "encoder.layer." + std::to_string(i) + ".");
    w.add_linear("attention.qkv",
                 {{"attention.self.query", c.d_model},
                  {"attention.self.key", c.d_model},
                  {"attention.self.value", c.d_model}},
                 c.d_model, true);
    w.add_linear("attention.out", {{"attention.output.dense", c.d_model}}, c.d_model, true);
    w.add_norm("norm1", "attention.output.LayerNorm", c.d_model);
    w.add_linear("mlp.up", {{"intermediate.dense", c.d_ff}}, c.d_model, true);
    w.add_linear("mlp.down", {{"output.dense", c.d_model}}, c.d_ff, true);
    w.add_norm("norm2", "output.LayerNorm", c.d_model);
  }
  const size_t encoder = table.rules.size();
  if (c.head == BertHead::classify || c.head == BertHead::regress) {
    w.at("classifier.", "");
    w.add_linear("dense", {{roberta ? "classifier.dense" : "bert.pooler.dense", c.d_model}}, c.d_model, true);
    w.add_linear("out", {{roberta ? "classifier.out_proj" : "classifier", c.outputs()}}, c.d_model, true);
  }
  if (c.head == BertHead::masked_lm) {
    w.at("language.", roberta ? "lm_head." : "cls.predictions.");
    w.add_linear("dense", {{roberta ? "dense" : "transform.dense", c.d_model}}, c.d_model, true);
    w.add_norm("norm", roberta ? "layer_norm" : "transform.LayerNorm", c.d_model);
    w.add("bias", "bias", {c.vocabulary});
    table.tied = {roberta ? "lm_head.decoder.weight" : "cls.predictions.decoder.weight"};
  }
  w.mark_head(encoder);
  return table;
}

}  // namespace tessera::pretrained
