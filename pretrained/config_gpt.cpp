#include <nlohmann/json.hpp>

#include "pretrained/config_families_internal.h"
#include "runtime/error.h"

namespace tessera::pretrained {
namespace {

using models::GptConfig;
using models::GptFamily;
using nlohmann::json;

}  // namespace

GptConfig read_gpt2(ConfigReader& reader) {
  GptConfig c{.family = GptFamily::gpt2,
              .vocabulary = reader.integer("vocab_size", 50257),
              .positions = reader.integer("n_positions", 1024),
              .d_model = reader.integer("n_embd", 768),
              .heads = reader.integer("n_head", 12),
              .layers = read_layers(reader, "n_layer", 12),
              .activation = read_activation(reader, "activation_function", "gelu_new"),
              .eps = reader.number("layer_norm_epsilon", 1e-5),
              .embedding_dropout = reader.number("embd_pdrop", 0.1),
              .attention_dropout = reader.number("attn_pdrop", 0.1),
              .residual_dropout = reader.number("resid_pdrop", 0.1),
              .tied = reader.flag("tie_word_embeddings", true),
              .init_deviation = reader.number("initializer_range", 0.02)};
  c.d_ff = reader.integer("n_inner", 4 * c.d_model);
  reader.expect("scale_attn_weights", true, "scores are divided by the root of the head's size");
  reader.expect("scale_attn_by_inverse_layer_idx", false, "scores are not divided by the layer's number");
  reader.ignore({"n_ctx", "summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels",
                 "summary_first_dropout", "reorder_and_upcast_attn"});
  return c;
}

GptConfig read_opt(ConfigReader& reader) {
  GptConfig c{.family = GptFamily::opt,
              .vocabulary = reader.integer("vocab_size", 50272),
              .positions = reader.integer("max_position_embeddings", 2048),
              .d_model = reader.integer("hidden_size", 768),
              .d_ff = reader.integer("ffn_dim", 3072),
              .heads = reader.integer("num_attention_heads", 12),
              .layers = read_layers(reader, "num_hidden_layers", 12),
              .activation = read_activation(reader, "activation_function", "relu"),
              .attention_dropout = reader.number("attention_dropout", 0.0),
              .residual_dropout = reader.number("dropout", 0.1),
              .tied = reader.flag("tie_word_embeddings", true),
              .init_deviation = reader.number("init_std", 0.02)};
  reader.expect("do_layer_norm_before", true, "norms stand before attention and MLP, as in all but OPT-350M");
  reader.expect("_remove_final_layer_norm", false, "a norm follows the last block");
  reader.expect("enable_bias", true, "products have biases");
  reader.expect("layer_norm_elementwise_affine", true, "norms have weights");
  reader.expect("word_embed_proj_dim", c.d_model, "the token table is as wide as the model");
  reader.expect("layerdrop", 0.0, "no layer is left out in training");
  reader.expect("activation_dropout", 0.0, "no dropout within the MLP");
  return c;
}

std::string config_text(const GptConfig& c) {
  const bool is_opt = c.family == GptFamily::opt;
  json text = common_fields(is_opt ? "opt" : "gpt2", is_opt ? "OPTForCausalLM" : "GPT2LMHeadModel", c.dtype);
  text.update({{"vocab_size", c.vocabulary}, {"tie_word_embeddings", c.tied}});
  if (is_opt) {
    check(c.embedding_dropout == 0 && c.eps == 1e-5, "config: OPT has no dropout of embeddings and eps 1e-5");
    text.update({{"max_position_embeddings", c.positions},
                 {"hidden_size", c.d_model},
                 {"word_embed_proj_dim", c.d_model},
                 {"ffn_dim", c.d_ff},
                 {"num_attention_heads", c.heads},
                 {"num_hidden_layers", c.layers},
                 {"activation_function", activation_name(c.activation)},
                 {"attention_dropout", c.attention_dropout},
                 {"dropout", c.residual_dropout},
                 {"init_std", c.init_deviation}});
  } else {
    text.update({{"n_positions", c.positions},
                 {"n_embd", c.d_model},
                 {"n_inner", c.d_ff},
                 {"n_head", c.heads},
                 {"n_layer", c.layers},
                 {"activation_function", activation_name(c.activation)},
                 {"layer_norm_epsilon", c.eps},
                 {"embd_pdrop", c.embedding_dropout},
                 {"attn_pdrop", c.attention_dropout},
                 {"resid_pdrop", c.residual_dropout},
                 {"initializer_range", c.init_deviation}});
  }
  return text.dump(2) + "\n";
}

}  // namespace tessera::pretrained
