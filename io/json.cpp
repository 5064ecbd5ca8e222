#include "io/json.h"

#include <nlohmann/json.hpp>
#include <set>
#include <vector>

#include "io/safetensors.h"
#include "runtime/error.h"

namespace tessera::io {

using nlohmann::json;

json parse_object(const std::string& where, std::string_view text) {
  constexpr int kDeepest = 64;
  // The parser would take a NUL for the end.
  check(text.find('\0') == std::string_view::npos, where, " holds a NUL byte; expected a JSON object");
  std::vector<std::set<std::string>> keys;  // of the objects that are open
  const json::parser_callback_t watch = [&](int depth, json::parse_event_t event, json& value) {
    check(depth <= kDeepest, where, " nests deeper than ", kDeepest);
    if (event == json::parse_event_t::object_start) keys.emplace_back();
    if (event == json::parse_event_t::object_end) keys.pop_back();
    if (event == json::parse_event_t::key)
      check(keys.back().insert(value.get<std::string>()).second, where, ": the key \"",
            shown(value.get<std::string>()), "\" occurs twice in one object");
    return true;
  };
  try {
    json object = json::parse(text.begin(), text.end(), watch);
    check(object.is_object(), where, " is not a JSON object");
    return object;
  } catch (const json::parse_error& error) {
    fail_at(Site::here(), where, " is not valid JSON at byte ", error.byte);
  } catch (const json::exception&) {
    fail_at(Site::here(), where, " is not valid JSON");
  }
}

}  // namespace tessera::io
