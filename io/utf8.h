#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>

/// File names are bytes, and may not be valid UTF-8; JSON, SQL and HTML are UTF-8.
/// Writers of such files pass names through here.

namespace tessera::io {

bool is_utf8(std::string_view bytes);

/// Each byte that is part of no character becomes the four characters `\xE9` (its value in hexadecimal), so
/// that names which differ still differ; all else stays as it is, backslashes too.
std::string utf8_text(std::string_view bytes);

/// The name of a file or folder as utf8_text gives it: "llama" for "a/llama" and for "a/llama/", and in
/// that folder also for "." and "./".
std::string utf8_name(const std::string& path);

/// The value as JSON, its strings and keys as utf8_text gives them. `indent`: blanks a level; -1: one line.
std::string json_text(const nlohmann::json& value, int indent = -1);

}  // namespace tessera::io
