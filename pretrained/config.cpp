#include "pretrained/config.h"

#include <filesystem>

#include "io/file.h"
#include "io/json.h"
#include "pretrained/config_families_internal.h"

namespace tessera::pretrained {
namespace {

using nlohmann::json;
using ops::Activation;

std::optional<DType> stated_dtype(ConfigReader& reader) {
  const std::string old_name = reader.text("torch_dtype", ""), name = reader.text("dtype", old_name);
  if (name.empty()) return {};
  if (name == "float32") return DType::f32;
  if (name == "bfloat16") return DType::bf16;
  if (name == "float16") return DType::f16;
  fail_at(Site::here(), reader.where(), ": the dtype is \"", name,
          "\"; expected float32, bfloat16 or float16");
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
  cola.activation = read_activation(parts, "activation", "silu");
  type = parts.text("model_type", type);
  parts.finish();
  check(cola.attention_rank + cola.mlp_rank > 0 &&
            (cola.activation == Activation::silu || cola.activation == Activation::relu_squared),
        parts.where(), ": expected a rank of attention or of the MLPs, and the activation silu or relu2");
  return cola;
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
    keep(read_gpt2(reader));
  else if (config.type == "opt")
    keep(read_opt(reader));
  else if (const auto family = llama_family(config.type))
    keep(read_llama(reader, *family, options.ignored_fields));
  else if (config.type == "bert")
    keep(read_bert(reader, models::BertFamily::bert, options));
  else if (config.type == "roberta")
    keep(read_bert(reader, models::BertFamily::roberta, options));
  else
    fail_at(Site::here(), "config: ", path, ": model_type is \"", config.type.substr(0, 60),
            "\"; expected gpt2, opt, llama, mistral, qwen2, qwen3, phi3, arcee, bert or roberta");
  return config;
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

}  // namespace tessera::pretrained
