#pragma once

#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <set>
#include <string>
#include <string_view>

#include "pretrained/config.h"
#include "pretrained/config_reader_internal.h"

/// The config.json of each family of models, read and, in config_text() of pretrained/config.h, written; and
/// the fields that they share.

namespace tessera::pretrained {

models::GptConfig read_gpt2(ConfigReader& reader);
models::GptConfig read_opt(ConfigReader& reader);
/// Any LlamaFamily. An absent field has the family's default in transformers. `ignored`: as
/// ConfigOptions::ignored_fields, for the fields of rope_parameters or rope_scaling.
models::LlamaConfig read_llama(ConfigReader& reader, models::LlamaFamily family,
                               const std::set<std::string>& ignored);
models::BertConfig read_bert(ConfigReader& reader, models::BertFamily family, const ConfigOptions& options);

/// That of a model_type; nothing if it is none.
std::optional<models::LlamaFamily> llama_family(std::string_view type);

/// Throws, naming the field, if it names none that is known.
ops::Activation read_activation(ConfigReader& reader, const char* key, const char* fallback);
/// As transformers calls it.
const char* activation_name(ops::Activation activation);
/// The number of layers. Throws if there are absurdly many.
int64_t read_layers(ConfigReader& reader, const char* key, int64_t fallback);
/// What every config.json begins with.
nlohmann::json common_fields(const char* type, const std::string& architecture, DType dtype);

}  // namespace tessera::pretrained
