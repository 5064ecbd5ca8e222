#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "pretrained/config_families_internal.h"
#include "runtime/error.h"

namespace tessera::pretrained {
namespace {

using models::LlamaConfig;
using models::LlamaFamily;
using nlohmann::json;

/// original_max_position_embeddings, which transformers takes from config.json itself if it is there, else
/// from the fields of the scaling. phi3 has a default at the first place.
int64_t trained_length(ConfigReader& reader, ConfigReader& scaling, const LlamaConfig& c) {
  constexpr const char* kKey = "original_max_position_embeddings";
  const int64_t within = scaling.integer(kKey, c.positions);
  return reader.integer(kKey, c.family == LlamaFamily::phi3 ? 4096 : within);
}

/// By how much yarn enlarges cosines and sines (transformers' get_mscale).
double yarn_scale(double factor, double mscale) {
  return factor <= 1 ? 1 : 0.1 * mscale * std::log(factor) + 1;
}

/// Fills rope and partial_rotary of `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling`
/// (before). Sizes and family are read already.
void read_rope(ConfigReader& reader, LlamaConfig& c, const std::set<std::string>& ignored) {
  ops::RopeOptions& options = c.rope;
  const bool is_phi3 = c.family == LlamaFamily::phi3;
  options.base = reader.number("rope_theta", 10000.0);
  const bool is_new = reader.has("rope_parameters");
  const json* const parts = reader.object(is_new ? "rope_parameters" : "rope_scaling");
  if (is_new)
    reader.expect("rope_scaling", nullptr, "rope_parameters are given");
  else
    reader.ignore({"rope_parameters"});
  const json none = json::object();
  ConfigReader scaling(reader.where() + ": " + (is_new ? "rope_parameters" : "rope_scaling"),
                       parts ? *parts : none);
  options.base = scaling.number("rope_theta", options.base);
  // transformers rotates whole heads in all other types, whatever a file says.
  constexpr const char* kPartial = "partial_rotary_factor";
  for (ConfigReader* const place : {&reader, &scaling})
    if (is_phi3)
      c.partial_rotary = place->number(kPartial, c.partial_rotary);
    else
      place->expect(kPartial, 1.0, "whole heads are rotated; phi3 alone rotates a part");
  check(c.partial_rotary > 0 && c.partial_rotary <= 1, reader.where(), ": partial_rotary_factor is ",
        c.partial_rotary, "; expected more than 0 and at most 1");
  const std::string old_name = scaling.text("type", "default"), name = scaling.text("rope_type", old_name);
  if (name != "default") {
    options.scaling = ops::parse_rope_scaling(is_phi3 && name == "su" ? "longrope" : name);
    const bool has_factor = options.scaling != ops::RopeScaling::longrope || scaling.has("factor");
    options.trained_length = trained_length(reader, scaling, c);
    options.factor =
        has_factor ? scaling.number("factor") : double(c.positions) / double(options.trained_length);
  }
  check(
      !is_phi3 || options.scaling == ops::RopeScaling::none || options.scaling == ops::RopeScaling::longrope,
      scaling.where(), ": rope_type is \"", name, "\"; phi3 has default and longrope");
  if (options.scaling == ops::RopeScaling::dynamic) options.trained_length = c.positions;
  if (options.scaling == ops::RopeScaling::llama3) {
    options.low_freq_factor = scaling.number("low_freq_factor");
    options.high_freq_factor = scaling.number("high_freq_factor");
  }
  if (options.scaling == ops::RopeScaling::yarn) {
    options.beta_fast = scaling.number("beta_fast", 32.0);
    options.beta_slow = scaling.number("beta_slow", 1.0);
    options.attention_factor = scaling.number("attention_factor", 0.0);
    scaling.expect("truncate", true, "the ramp begins and ends at whole pairs");
    const double own = scaling.number("mscale", 0.0), all = scaling.number("mscale_all_dim", 0.0);
    // As transformers: one of the two alone changes nothing.
    if (options.attention_factor == 0 && own != 0 && all != 0)
      options.attention_factor = yarn_scale(options.factor, own) / yarn_scale(options.factor, all);
  }
  if (options.scaling == ops::RopeScaling::longrope) {
    options.factor = std::max(options.factor, 1.0);  // a smaller one does as little
    options.attention_factor = scaling.number("attention_factor", 0.0);
    options.short_factor = scaling.numbers("short_factor", c.rotary() / 2);
    options.long_factor = scaling.numbers("long_factor", c.rotary() / 2);
  }
  scaling.ignore({"original_max_position_embeddings"});
  if (is_phi3) reader.ignore({"original_max_position_embeddings"});
  scaling.finish(ignored);
}

/// The sliding window of mistral and phi3; `fallback` if the field is absent. 0 means no window.
int64_t window(ConfigReader& reader, int64_t fallback) {
  return reader.is_null("sliding_window") ? 0 : reader.integer("sliding_window", fallback);
}

/// The same for qwen2 and qwen3, where the first layers may lack it. A text has to fit into it in any case.
void read_qwen_window(ConfigReader& reader, LlamaConfig& c) {
  const int64_t layers = c.layers;
  const bool used = reader.flag("use_sliding_window", false);
  const int64_t size = window(reader, 4096);
  int64_t first = std::min(std::max<int64_t>(reader.integer("max_window_layers", 28), 0), layers);
  if (const json* const types = reader.any("layer_types")) {
    const auto is = [](const char* name) { return [name](const json& type) { return type == name; }; };
    const bool known = types->is_array() && int64_t(types->size()) == layers &&
                       std::all_of(types->begin(), types->end(), [&](const json& type) {
                         return is("full_attention")(type) || is("sliding_attention")(type);
                       });
    check(known, reader.where(), ": layer_types is ", types->dump().substr(0, 60), "; expected ", layers,
          " times \"full_attention\" or \"sliding_attention\"");
    const auto sliding = std::find_if(types->begin(), types->end(), is("sliding_attention"));
    first = sliding - types->begin();
    check(first == layers || (used && size > 0), reader.where(),
          ": layer_types has \"sliding_attention\", but ",
          used ? "there is no sliding_window" : "use_sliding_window is false");
    check(std::find_if(sliding, types->end(), is("full_attention")) == types->end(), reader.where(),
          ": layer_types has \"full_attention\" after \"sliding_attention\"; only a window from "
          "some layer on is supported");
  }
  if (!used || size == 0 || first == layers) return;
  c.window = size, c.full_layers = first;
}

constexpr LlamaFamily kLlamaFamilies[] = {LlamaFamily::llama, LlamaFamily::mistral, LlamaFamily::qwen2,
                                          LlamaFamily::qwen3, LlamaFamily::phi3,    LlamaFamily::arcee};

/// As transformers calls the class of its language model.
const char* architecture_name(LlamaFamily family) {
  constexpr const char* kNames[] = {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM",
                                    "Qwen3ForCausalLM", "Phi3ForCausalLM",    "ArceeForCausalLM"};
  return kNames[size_t(family)];
}

}  // namespace

std::optional<LlamaFamily> llama_family(std::string_view type) {
  for (const LlamaFamily family : kLlamaFamilies)
    if (type == name_of(family)) return family;
  return {};
}

LlamaConfig read_llama(ConfigReader& reader, LlamaFamily family, const std::set<std::string>& ignored) {
  struct Defaults {
    int64_t vocabulary, positions, d_model, d_ff, kv_heads, head_dim;  // kv_heads 0: as many as heads
    double eps;
  };
  constexpr Defaults kDefaults[] = {
      {32000, 2048, 4096, 11008, 0, 0, 1e-6},    {32000, 131072, 4096, 14336, 8, 0, 1e-6},
      {151936, 32768, 4096, 22016, 32, 0, 1e-6}, {151936, 32768, 4096, 22016, 32, 128, 1e-6},
      {32064, 4096, 3072, 8192, 0, 0, 1e-5},     {32000, 4096, 2560, 18432, 0, 0, 1e-5}};
  const Defaults& usual = kDefaults[size_t(family)];
  const bool is_llama = family == LlamaFamily::llama, is_phi3 = family == LlamaFamily::phi3;
  const bool is_arcee = family == LlamaFamily::arcee;
  LlamaConfig c{.family = family,
                .vocabulary = reader.integer("vocab_size", usual.vocabulary),
                .positions = reader.integer("max_position_embeddings", usual.positions),
                .d_model = reader.integer("hidden_size", usual.d_model),
                .d_ff = reader.integer("intermediate_size", usual.d_ff),
                .heads = reader.integer("num_attention_heads", 32),
                .head_dim = reader.integer("head_dim", usual.head_dim),
                .layers = read_layers(reader, "num_hidden_layers", 32),
                .eps = reader.number("rms_norm_eps", usual.eps),
                .activation = read_activation(reader, "hidden_act", is_arcee ? "relu2" : "silu"),
                .gated = !is_arcee,
                .attention_dropout = reader.number("attention_dropout", 0.0),
                .tied = reader.flag("tie_word_embeddings", false),
                .init_deviation = reader.number("initializer_range", 0.02)};
  const bool as_many = usual.kv_heads == 0 || reader.is_null("num_key_value_heads");
  c.kv_heads = reader.integer("num_key_value_heads", as_many ? c.heads : usual.kv_heads);
  if (is_llama) {
    c.gated = reader.flag("gated_mlp", true);              // of tessera's own
    reader.ignore({"pretraining_tp", "is_llama_config"});  // how a product is cut: the same sums; what it is
    reader.expect("rope_interleaved", false, "the elements of a pair are half a head apart");
  }
  if (is_llama || is_arcee) c.mlp_bias = reader.flag("mlp_bias", false);
  if (is_llama || is_arcee || family == LlamaFamily::qwen3)
    c.attention_bias = reader.flag("attention_bias", false);
  if (family == LlamaFamily::mistral) c.window = window(reader, 4096);
  if (family == LlamaFamily::qwen2 || family == LlamaFamily::qwen3) {
    read_qwen_window(reader, c);
    reader.expect("use_mrope", false, "a token has one position");
  }
  if (is_phi3) {
    c.window = window(reader, 0);
    c.embedding_dropout = reader.number("embd_pdrop", 0.0);
    c.residual_dropout = reader.number("resid_pdrop", 0.0);
    for (const char* const bias : {"attention_bias", "mlp_bias", "lm_head_bias"})
      reader.expect(bias, false, "phi3 has no biases");
    // Fields of Phi-4-mini: transformers knows only these values.
    reader.expect("full_attn_mod", 1, "every layer attends to all tokens");
    reader.expect("interpolate_factor", 1, "positions are those of the tokens");
    reader.ignore({"auto_map"});  // where the code was before transformers had it
  }
  check(c.heads > 0, reader.where(), ": num_attention_heads is 0");
  read_rope(reader, c, ignored);
  return c;
}

std::string config_text(const LlamaConfig& c) {
  const bool is_llama = c.family == LlamaFamily::llama, is_phi3 = c.family == LlamaFamily::phi3;
  const bool is_arcee = c.family == LlamaFamily::arcee;
  json text = common_fields(name_of(c.family), architecture_name(c.family), c.dtype);
  text.update({{"vocab_size", c.vocabulary},
               {"max_position_embeddings", c.positions},
               {"hidden_size", c.d_model},
               {"intermediate_size", c.d_ff},
               {"num_attention_heads", c.heads},
               {"num_key_value_heads", c.kv_heads},
               {"head_dim", c.effective_head_dim()},
               {"num_hidden_layers", c.layers},
               {"rms_norm_eps", c.eps},
               {"hidden_act", activation_name(c.activation)},
               {"attention_dropout", c.attention_dropout},
               {"tie_word_embeddings", c.tied},
               {"initializer_range", c.init_deviation},
               {"rope_theta", c.rope.base}});
  if (is_llama || is_arcee) text["mlp_bias"] = c.mlp_bias;
  if (is_llama || is_arcee || c.family == LlamaFamily::qwen3) text["attention_bias"] = c.attention_bias;
  if (!c.gated && !is_arcee) text["gated_mlp"] = false;
  if (!is_llama && !is_arcee) text["sliding_window"] = c.window > 0 ? json(c.window) : json(nullptr);
  if (c.family == LlamaFamily::qwen2 || c.family == LlamaFamily::qwen3)
    text.update({{"use_sliding_window", c.window > 0},
                 {"max_window_layers", c.window > 0 ? c.full_layers : c.layers}});
  if (is_phi3)
    text.update({{"partial_rotary_factor", c.partial_rotary},
                 {"embd_pdrop", c.embedding_dropout},
                 {"resid_pdrop", c.residual_dropout},
                 {"pad_token_id", nullptr}});  // the default of transformers is beyond a small vocabulary
  const ops::RopeOptions& rope = c.rope;
  if (rope.scaling == ops::RopeScaling::none) return text.dump(2) + "\n";
  json scaling = {{"rope_type", ops::name_of(rope.scaling)}, {"factor", rope.factor}};
  const bool longrope = rope.scaling == ops::RopeScaling::longrope,
             yarn = rope.scaling == ops::RopeScaling::yarn;
  if (longrope || yarn || rope.scaling == ops::RopeScaling::llama3)
    scaling["original_max_position_embeddings"] = rope.trained_length;
  if (rope.scaling == ops::RopeScaling::llama3)
    scaling.update({{"low_freq_factor", rope.low_freq_factor}, {"high_freq_factor", rope.high_freq_factor}});
  if (yarn) scaling.update({{"beta_fast", rope.beta_fast}, {"beta_slow", rope.beta_slow}});
  if (longrope) scaling.update({{"short_factor", rope.short_factor}, {"long_factor", rope.long_factor}});
  if ((longrope || yarn) && rope.attention_factor > 0) scaling["attention_factor"] = rope.attention_factor;
  text["rope_scaling"] = scaling;
  // In a phi3 transformers ignores the scaling's own.
  if (longrope && is_phi3) text["original_max_position_embeddings"] = rope.trained_length;
  return text.dump(2) + "\n";
}

}  // namespace tessera::pretrained
