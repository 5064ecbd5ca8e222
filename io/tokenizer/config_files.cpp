#include <algorithm>
#include <charconv>
#include <filesystem>
#include <set>

#include "io/safetensors_internal.h"
#include "io/tokenizer/file_internal.h"
#include "io/tokenizer/settings_internal.h"
#include "runtime/error.h"

// The files next to a vocabulary that say which of its tokens are special, and which there are besides.

namespace tessera::io {
namespace {

constexpr uint64_t kLargestConfig = 16 << 20;
constexpr const char* kRoles[] = {"bos_token", "eos_token", "unk_token", "sep_token",
                                  "pad_token", "cls_token", "mask_token"};

nlohmann::json read_object(const std::filesystem::path& path) {
  std::error_code ignored;
  if (!std::filesystem::exists(path, ignored)) return nlohmann::json::object();
  return parse_small_json(path.string(), read_file(path.string(), kLargestConfig));
}

/// A token is its text, or an object with its text and flags.
std::string text_of_token(const Settings& token) {
  return token.json().is_object() ? token.text("content") : token.text();
}

AddedToken configured_token(const Settings& from, int64_t id, bool special) {
  AddedToken token;
  token.content = text_of_token(from);
  token.id = int32_t(id);
  token.special = special;
  if (from.json().is_object()) {
    token.special = special || from.flag("special", false);
    token.single_word = from.flag("single_word", false);
    token.lstrip = from.flag("lstrip", false);
    token.rstrip = from.flag("rstrip", false);
  }
  token.normalized = from.json().is_object() ? from.flag("normalized", !token.special) : !token.special;
  check(token.content.size() <= kLongestAdded, "tokenizer: ", from.where(), ": a token of ",
        token.content.size(), " bytes, more than ", kLongestAdded);
  return token;
}

int64_t number_of_key(const std::string& key, const std::string& where) {
  int64_t id = -1;
  const auto [end, error] = std::from_chars(key.data(), key.data() + key.size(), id);
  check(error == std::errc() && end == key.data() + key.size() && id >= 0 && id < kMostTokens,
        "tokenizer: ", where, ": the key \"", shown(key), "\" is no number from 0 to ", kMostTokens - 1);
  return id;
}

}  // namespace

TokenizerConfig read_tokenizer_config(const std::string& folder) {
  TokenizerConfig config;
  if (folder.empty()) return config;
  const std::filesystem::path at = folder;
  config.path = (at / "tokenizer_config.json").string();
  config.fields = read_object(config.path);
  config.added = read_object(at / "added_tokens.json");
  if (config.fields.contains("added_tokens_decoder")) return config;
  const nlohmann::json map = read_object(at / "special_tokens_map.json");
  for (const auto& [key, value] : map.items()) config.fields[key] = value;
  return config;
}

TokenizerConfig read_pair_config(const std::string& folder) {
  TokenizerConfig config = read_tokenizer_config(folder);
  if (config.fields.contains("tokenizer_class")) return config;
  const nlohmann::json model = read_object(std::filesystem::path(folder) / "config.json");
  const std::string type = Settings(model, folder + "/config.json: ").text("model_type", "");
  for (const char* const gpt2 : {"gpt2", "opt", "qwen2", "qwen3"})
    if (type == gpt2) config.fields["tokenizer_class"] = "GPT2Tokenizer";
  return config;
}

std::optional<std::string> TokenizerConfig::token(const std::string& role) const {
  const Settings says(fields, path + ": ");
  if (!says.has(role)) return std::nullopt;
  return text_of_token(says.at(role));
}

std::vector<AddedToken> TokenizerConfig::added_tokens(
    const std::function<int32_t(const std::string&)>& find) const {
  const Settings says(fields, path + ": ");
  std::vector<Settings> special;
  for (const char* const role : kRoles)
    if (says.has(role)) special.push_back(says.at(role));
  for (const char* const list : {"additional_special_tokens", "extra_special_tokens"})
    if (says.has(list) && says.at(list).json().is_array())
      for (const Settings& token : says.list(list)) special.push_back(token);
  std::set<std::string> special_texts;
  for (const Settings& token : special) special_texts.insert(text_of_token(token));

  std::vector<AddedToken> tokens;
  if (says.has("added_tokens_decoder")) {
    const Settings listed = says.at("added_tokens_decoder");
    for (const auto& [key, value] : listed.json().items()) {
      const int64_t id = number_of_key(key, listed.where());
      const Settings token(value, listed.where() + "." + key);
      tokens.push_back(configured_token(token, id, special_texts.contains(text_of_token(token))));
    }
  } else {
    for (const auto& [text, number] : added.items()) {
      const std::string where = (std::filesystem::path(path).parent_path() / "added_tokens.json").string() +
                                ": \"" + shown(text) + "\"";
      const int64_t id = Settings(number, where).number(0, kMostTokens - 1);
      const nlohmann::json content = text;
      tokens.push_back(configured_token(Settings(content, where), id, special_texts.contains(text)));
    }
  }
  for (const Settings& token : special) {
    const std::string text = text_of_token(token);
    const auto is_same = [&](const AddedToken& other) { return other.content == text; };
    const int32_t id = std::ranges::any_of(tokens, is_same) ? -1 : find(text);
    if (id >= 0) tokens.push_back(configured_token(token, id, true));
  }
  std::ranges::sort(tokens, {}, &AddedToken::id);
  return tokens;
}

}  // namespace tessera::io
