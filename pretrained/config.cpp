#include "pretrained/config.h"

#include <algorithm>
#include <cmath>
#include <filesystem>

#include "io/file.h"
#include "io/json.h"
#include "pretrained/config_reader_internal.h"

namespace tessera::pretrained {
namespace {

using models::BertConfig;
using models::BertFamily;
using models::BertHead;
using models::GptConfig;
using models::GptFamily;
using models::LlamaConfig;
using models::LlamaFamily;
using nlohmann::json;
using ops::Activation;

constexpr int64_t kMostLayers =
    10'000;  // ten times the deepest model; names of all are listed before weights are read

struct ActivationName {
  const char* name;
  Activation activation;
};
/// First the name that is written, then others of the same function.
constexpr ActivationName kActivations[] = {{"gelu", Activation::gelu},
                                           {"gelu_python", Activation::gelu},
                                           {"gelu_new", Activation::gelu_tanh},
                                           {"gelu_fast", Activation::gelu_tanh},
                                           {"gelu_accurate", Activation::gelu_tanh},
                                           {"gelu_python_tanh", Activation::gelu_tanh},
                                           {"gelu_pytorch_tanh", Activation::gelu_tanh},
                                           {"relu", Activation::relu},
                                           {"relu2", Activation::relu_squared},
                                           {"silu", Activation::silu},
                                           {"swish", Activation::silu}};

Activation activation(ConfigReader& reader, const char* key, const char* fallback) {
  const std::string name = reader.text(key, fallback);
  for (const ActivationName& known : kActivations)
    if (name == known.name) return known.activation;
  fail_at(Site::here(), reader.where(), ": ", key, " is \"", name,
          "\"; expected gelu, gelu_python, gelu_new, gelu_fast, gelu_accurate, gelu_python_tanh, "
          "gelu_pytorch_tanh, relu, relu2, silu or swish");
}

const char* activation_name(Activation activation) {
  for (const ActivationName& known : kActivations)
    if (known.activation == activation) return known.name;
  fail_at(Site::here(), "config: activation ", ops::name_of(activation), " has no name in transformers");
}

std::optional<DType> stated_dtype(ConfigReader& reader) {
  const std::string old_name = reader.text("torch_dtype", ""), name = reader.text("dtype", old_name);
  if (name.empty()) return {};
  if (name == "float32") return DType::f32;
  if (name == "bfloat16") return DType::bf16;
  if (name == "float16") return DType::f16;
  fail_at(Site::here(), reader.where(), ": the dtype is \"", name,
          "\"; expected float32, bfloat16 or float16");
}

int64_t layers(ConfigReader& reader, const char* key, int64_t fallback) {
  const int64_t count = reader.integer(key, fallback);
  check(count <= kMostLayers, reader.where(), ": ", key, " is ", count, ", more than ", kMostLayers);
  return count;
}

/// What every configuration of transformers may carry and no model here computes with.
void ignore_common(ConfigReader& reader) {
  reader.ignore({"transformers_version",
                 "model_type",
                 "output_hidden_states",
                 "output_attentions",
                 "return_dict",
                 "use_cache",
                 "torchscript",
                 "problem_type",
                 "id2label",
                 "label2id",
                 "num_labels",
                 "pad_token_id",
                 "bos_token_id",
                 "eos_token_id",
                 "sep_token_id",
                 "cls_token_id",
                 "decoder_start_token_id",
                 "task_specific_params",
                 "finetuning_task",
                 "prefix",
                 "chunk_size_feed_forward",
                 "tokenizer_class",
                 "attn_implementation",
                 "gradient_checkpointing",
                 "architectures",
                 "use_bfloat16",
                 "output_past",  // of GPT-2's first files: use_cache
                 "transformers.js_config",
                 "name_or_path"});
  // Defaults of generate() that older files repeat here.
  reader.ignore({"max_length",
                 "min_length",
                 "do_sample",
                 "early_stopping",
                 "num_beams",
                 "num_beam_groups",
                 "diversity_penalty",
                 "temperature",
                 "top_k",
                 "top_p",
                 "typical_p",
                 "repetition_penalty",
                 "length_penalty",
                 "no_repeat_ngram_size",
                 "encoder_no_repeat_ngram_size",
                 "bad_words_ids",
                 "num_return_sequences",
                 "output_scores",
                 "return_dict_in_generate",
                 "forced_bos_token_id",
                 "forced_eos_token_id",
                 "remove_invalid_values",
                 "exponential_decay_length_penalty",
                 "suppress_tokens",
                 "begin_suppress_tokens"});
  reader.expect("is_encoder_decoder", false, "no model of two parts");
  reader.expect("is_decoder", false, "it is what its type says");
  reader.expect("add_cross_attention", false, "no attention to another model");
  reader.expect("pruned_heads", json::object(), "all heads are there");
  reader.expect("tie_encoder_decoder", false, "no model of two parts");
  reader.expect("cross_attention_hidden_size", nullptr, "no attention to another model");
  reader.expect("quantization_config", nullptr, "weights are not quantised");
}

GptConfig gpt2(ConfigReader& reader) {
  GptConfig c{.family = GptFamily::gpt2,
              .vocabulary = reader.integer("vocab_size", 50257),
              .positions = reader.integer("n_positions", 1024),
              .d_model = reader.integer("n_embd", 768),
              .heads = reader.integer("n_head", 12),
              .layers = layers(reader, "n_layer", 12),
              .activation = activation(reader, "activation_function", "gelu_new"),
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

GptConfig opt(ConfigReader& reader) {
  GptConfig c{.family = GptFamily::opt,
              .vocabulary = reader.integer("vocab_size", 50272),
              .positions = reader.integer("max_position_embeddings", 2048),
              .d_model = reader.integer("hidden_size", 768),
              .d_ff = reader.integer("ffn_dim", 3072),
              .heads = reader.integer("num_attention_heads", 12),
              .layers = layers(reader, "num_hidden_layers", 12),
              .activation = activation(reader, "activation_function", "relu"),
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

/// The config.json of any LlamaFamily. An absent field has the family's default in transformers.
LlamaConfig llama(ConfigReader& reader, LlamaFamily family, const std::set<std::string>& ignored) {
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
                .layers = layers(reader, "num_hidden_layers", 32),
                .eps = reader.number("rms_norm_eps", usual.eps),
                .activation = activation(reader, "hidden_act", is_arcee ? "relu2" : "silu"),
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

/// What `architectures` says that the weights are of, without the family's own name.
std::string architecture(ConfigReader& reader, std::string_view family) {
  const json* const list = reader.any("architectures");
  if (!list || !list->is_array() || list->empty() || !(*list)[0].is_string()) return "Model";
  const std::string name = (*list)[0].get<std::string>();
  return name.starts_with(family) ? name.substr(family.size()) : name;
}

BertHead bert_head(ConfigReader& reader, BertFamily family, int64_t labels) {
  const std::string kind = architecture(reader, family == BertFamily::bert ? "Bert" : "Roberta");
  if (kind == "Model") return BertHead::none;
  if (kind == "ForMaskedLM" || kind == "ForPreTraining") return BertHead::masked_lm;
  check(kind == "ForSequenceClassification", reader.where(), ": architectures names ", kind,
        "; expected Model, ForMaskedLM, ForPreTraining or ForSequenceClassification");
  const std::string problem =
      reader.text("problem_type", labels == 1 ? "regression" : "single_label_classification");
  if (problem == "regression") {
    check(labels == 1, reader.where(), ": regression of ", labels, " numbers; only one is supported");
    return BertHead::regress;
  }
  check(problem == "single_label_classification", reader.where(), ": problem_type is \"", problem,
        "\"; expected regression or single_label_classification");
  return BertHead::classify;
}

BertConfig bert(ConfigReader& reader, BertFamily family, const ConfigOptions& options) {
  const bool roberta = family == BertFamily::roberta;
  BertConfig c{.family = family,
               .vocabulary = reader.integer("vocab_size", roberta ? 50265 : 30522),
               .positions = reader.integer("max_position_embeddings", 512),
               .types = reader.integer("type_vocab_size", 2),
               .d_model = reader.integer("hidden_size", 768),
               .d_ff = reader.integer("intermediate_size", 3072),
               .heads = reader.integer("num_attention_heads", 12),
               .layers = layers(reader, "num_hidden_layers", 12),
               .pad_token = reader.integer("pad_token_id", roberta ? 1 : 0),
               .activation = activation(reader, "hidden_act", "gelu"),
               .eps = reader.number("layer_norm_eps", 1e-12),
               .hidden_dropout = reader.number("hidden_dropout_prob", 0.1),
               .attention_dropout = reader.number("attention_probs_dropout_prob", 0.1),
               .init_deviation = reader.number("initializer_range", 0.02)};
  c.classifier_dropout = reader.number("classifier_dropout", c.hidden_dropout);
  const json* const names = reader.object("id2label");
  c.labels = reader.integer("num_labels", names ? int64_t(names->size()) : 2);
  if (options.labels) c.labels = *options.labels;
  c.head = options.head ? *options.head : bert_head(reader, family, c.labels);
  reader.expect("position_embedding_type", "absolute", "positions are added to the tokens");
  reader.expect("tie_word_embeddings", true, "the masked language head uses the token table");
  // A pooler of old files, which no head here has.
  reader.ignore({"directionality", "pooler_fc_size", "pooler_num_attention_heads", "pooler_num_fc_layers",
                 "pooler_size_per_head", "pooler_type"});
  return c;
}

constexpr LlamaFamily kLlamaFamilies[] = {LlamaFamily::llama, LlamaFamily::mistral, LlamaFamily::qwen2,
                                          LlamaFamily::qwen3, LlamaFamily::phi3,    LlamaFamily::arcee};

std::optional<LlamaFamily> llama_family(std::string_view type) {
  for (const LlamaFamily family : kLlamaFamilies)
    if (type == name_of(family)) return family;
  return {};
}

/// As transformers calls the class of its language model.
const char* architecture_name(LlamaFamily family) {
  constexpr const char* kNames[] = {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM",
                                    "Qwen3ForCausalLM", "Phi3ForCausalLM",    "ArceeForCausalLM"};
  return kNames[size_t(family)];
}

std::vector<int64_t> token_list(ConfigReader& reader, const char* key) {
  std::vector<int64_t> tokens;
  const json* const value = reader.any(key);
  if (!value) return tokens;
  const auto add = [&](const json& token) {
    check(token.is_number_integer() && token >= 0 && token < int64_t{1} << 31, reader.where(), ": ", key,
          " is not a token or a list of tokens");
    tokens.push_back(token.get<int64_t>());
  };
  if (value->is_array())
    for (const json& token : *value) add(token);
  else
    add(*value);
  return tokens;
}

/// `type`: the model_type, which becomes that of the model whose layers are nn::Cola.
std::optional<ColaConfig> cola_config(ConfigReader& reader, bool accepted, std::string& type) {
  const json* const field = reader.object(kColaField);
  if (!field) return {};
  check(accepted, reader.where(), ": the weights are factors with an activation between them (", kColaField,
        "); this command takes dense weights only, while generate, eval and sparsity activations take such a "
        "model");
  ConfigReader parts(reader.where() + ": " + kColaField, *field);
  ColaConfig cola{.attention_rank = parts.integer("attention_rank"), .mlp_rank = parts.integer("mlp_rank")};
  cola.activation = activation(parts, "activation", "silu");
  type = parts.text("model_type", type);
  parts.finish();
  check(cola.attention_rank + cola.mlp_rank > 0 &&
            (cola.activation == Activation::silu || cola.activation == Activation::relu_squared),
        parts.where(), ": expected a rank of attention or of the MLPs, and the activation silu or relu2");
  return cola;
}

json common(const char* type, const std::string& architecture, DType dtype) {
  return {{"model_type", type}, {"architectures", {architecture}}, {"torch_dtype", dtype_name(dtype)}};
}

}  // namespace

Config parse_config(const std::string& path, std::string_view text, const ConfigOptions& options) {
  const json object = io::parse_object("config: " + path, text);
  ConfigReader reader("config: " + path, object);
  Config config;
  config.type = reader.text("model_type");
  if (const auto first = token_list(reader, "bos_token_id"); !first.empty()) config.first_token = first[0];
  config.end_tokens = token_list(reader, "eos_token_id");
  config.cola = cola_config(reader, options.cola, config.type);
  config.stated_dtype = stated_dtype(reader);
  const auto keep = [&](auto model) {
    model.dtype = config.stated_dtype.value_or(DType::f32);
    ignore_common(reader);
    reader.finish(options.ignored_fields);
    model.validate();
    config.model = model;
  };
  if (config.type == "gpt2")
    keep(gpt2(reader));
  else if (config.type == "opt")
    keep(opt(reader));
  else if (const auto family = llama_family(config.type))
    keep(llama(reader, *family, options.ignored_fields));
  else if (config.type == "bert")
    keep(bert(reader, BertFamily::bert, options));
  else if (config.type == "roberta")
    keep(bert(reader, BertFamily::roberta, options));
  else
    fail_at(Site::here(), "config: ", path, ": model_type is \"", config.type.substr(0, 60),
            "\"; expected gpt2, opt, llama, mistral, qwen2, qwen3, phi3, arcee, bert or roberta");
  return config;
}

const char* dtype_name(DType dtype) {
  return dtype == DType::bf16 ? "bfloat16" : dtype == DType::f16 ? "float16" : "float32";
}

Config read_config(const std::string& path, const ConfigOptions& options) {
  constexpr uint64_t kMost = uint64_t{1} << 20;
  std::error_code ignored;
  const bool is_folder = std::filesystem::is_directory(path, ignored);
  const std::string file = is_folder ? path + "/config.json" : path, own = path + "/generation_config.json";
  Config config = parse_config(file, io::read_file(file, kMost), options);
  if (!is_folder || !std::filesystem::is_regular_file(own, ignored)) return config;
  const json generation = io::parse_object("config: " + own, io::read_file(own, kMost));
  ConfigReader reader("config: " + own, generation);
  if (reader.has("eos_token_id")) config.end_tokens = token_list(reader, "eos_token_id");
  return config;
}

std::string config_text(const GptConfig& c) {
  const bool is_opt = c.family == GptFamily::opt;
  json text = common(is_opt ? "opt" : "gpt2", is_opt ? "OPTForCausalLM" : "GPT2LMHeadModel", c.dtype);
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

std::string config_text(const LlamaConfig& c) {
  const bool is_llama = c.family == LlamaFamily::llama, is_phi3 = c.family == LlamaFamily::phi3;
  const bool is_arcee = c.family == LlamaFamily::arcee;
  json text = common(name_of(c.family), architecture_name(c.family), c.dtype);
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

std::string config_text(const BertConfig& c) {
  const bool roberta = c.family == BertFamily::roberta;
  const std::string kind = c.head == BertHead::none        ? "Model"
                           : c.head == BertHead::masked_lm ? "ForMaskedLM"
                                                           : "ForSequenceClassification";
  json text = common(roberta ? "roberta" : "bert", (roberta ? "Roberta" : "Bert") + kind, c.dtype);
  text.update({{"vocab_size", c.vocabulary},
               {"max_position_embeddings", c.positions},
               {"type_vocab_size", c.types},
               {"hidden_size", c.d_model},
               {"intermediate_size", c.d_ff},
               {"num_attention_heads", c.heads},
               {"num_hidden_layers", c.layers},
               {"pad_token_id", c.pad_token},
               {"hidden_act", activation_name(c.activation)},
               {"layer_norm_eps", c.eps},
               {"hidden_dropout_prob", c.hidden_dropout},
               {"attention_probs_dropout_prob", c.attention_dropout},
               {"classifier_dropout", c.classifier_dropout},
               {"initializer_range", c.init_deviation}});
  if (kind == "ForSequenceClassification") {
    json names = json::object(), numbers = json::object();
    for (int64_t i = 0; i < c.outputs(); ++i) {
      const std::string name = "LABEL_" + std::to_string(i);
      names[std::to_string(i)] = name;
      numbers[name] = i;
    }
    text.update({{"id2label", names}, {"label2id", numbers}});
    text["problem_type"] = c.head == BertHead::regress ? "regression" : "single_label_classification";
  }
  return text.dump(2) + "\n";
}

}  // namespace tessera::pretrained
