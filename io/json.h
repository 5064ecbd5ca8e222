#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>

namespace tessera::io {

/// The JSON object that `text` is. Throws, with `where` in front, if it is something else, nests deeper than
/// 64, or names a key twice in one object, of which a parser would take the last.
nlohmann::json parse_object(const std::string& where, std::string_view text);

}  // namespace tessera::io
