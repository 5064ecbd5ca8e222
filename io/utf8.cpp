#include "io/utf8.h"

#include <filesystem>
#include <nlohmann/json.hpp>

#include "io/tokenizer/unicode_internal.h"

namespace tessera::io {
namespace {

using nlohmann::json;

json repaired(const json& value) {
  if (value.is_string()) return utf8_text(value.get_ref<const std::string&>());
  if (!value.is_structured()) return value;
  json out = value.is_object() ? json::object() : json::array();
  for (const auto& [key, part] : value.items())
    if (value.is_object())
      out[utf8_text(key)] = repaired(part);
    else
      out.push_back(repaired(part));
  return out;
}

}  // namespace

bool is_utf8(std::string_view bytes) {
  return unicode::valid_prefix(bytes) == bytes.size();
}

std::string utf8_text(std::string_view bytes) {
  constexpr char kDigits[] = "0123456789ABCDEF";
  std::string text;
  while (true) {
    const size_t valid = unicode::valid_prefix(bytes);
    text += bytes.substr(0, valid);
    if (valid == bytes.size()) return text;
    const auto byte = static_cast<unsigned char>(bytes[valid]);
    text += {'\\', 'x', kDigits[byte >> 4], kDigits[byte & 15]};
    bytes.remove_prefix(valid + 1);
  }
}

std::string utf8_name(const std::string& path) {
  std::error_code ignored;
  std::filesystem::path whole = std::filesystem::absolute(path, ignored).lexically_normal();
  if (!whole.has_filename()) whole = whole.parent_path();
  return utf8_text(whole.filename().string());
}

std::string json_text(const json& value, int indent) {
  return repaired(value).dump(indent);
}

}  // namespace tessera::io
