#pragma once

#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "models/bert.h"
#include "models/gpt.h"
#include "models/llama.h"
#include "pretrained/cola.h"

/// The config.json of a Hugging Face model, as the configuration of one of ours and back.
///
/// A field that changes the mathematics and has no counterpart here is refused unless it has the value that
/// changes nothing; so is an unknown field. Fields that concern other things (how a tokenizer splits, what
/// generate() does by default, where the file came from) are ignored. A field that is absent has the default
/// of transformers.

namespace tessera::pretrained {

struct ConfigOptions {
  std::set<std::string> ignored_fields = {};  // known by the caller to change nothing
  std::optional<models::BertHead> head = {};  // instead of what `architectures` says
  std::optional<int64_t> labels = {};         // of a classifier, instead of id2label
  bool cola = false;                          // accepts models of nn::Cola layers (pretrained/cola.h)
};

struct Config {
  std::string type;  // "gpt2", "opt", "bert", "roberta" or one of a models::LlamaFamily
  std::variant<models::GptConfig, models::LlamaConfig, models::BertConfig> model;
  std::optional<int64_t> first_token;  // what a text begins with
  std::vector<int64_t> end_tokens;     // what ends it
  std::optional<DType> stated_dtype;   // what config.json says of the weights (pretrained::stored_dtype)
  std::optional<ColaConfig> cola;      // given: the blocks' linear layers are nn::Cola
};

/// "bfloat16", as config.json calls it.
const char* dtype_name(DType dtype);

/// `text` of the file `path`. The model's dtype is the one that it states, else f32. Throws, naming path and
/// field.
Config parse_config(const std::string& path, std::string_view text, const ConfigOptions& options = {});
/// Of a folder, or of the file itself. At most 1 MiB. In a folder the end tokens of generation_config.json,
/// if it names any, are taken in place of config.json's, as transformers does.
Config read_config(const std::string& path, const ConfigOptions& options = {});

/// The config.json that transformers and parse_config read back as the same model.
std::string config_text(const models::GptConfig& config);
std::string config_text(const models::LlamaConfig& config);
std::string config_text(const models::BertConfig& config);

}  // namespace tessera::pretrained
