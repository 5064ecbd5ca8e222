#include <cmath>

#include "pretrained/config_reader_internal.h"

namespace tessera::pretrained {
namespace {

using nlohmann::json;

/// A value as a message shows it.
std::string shown(const json& value) {
  const std::string text = value.dump(-1, ' ', true, json::error_handler_t::replace);
  return text.size() > 60 ? text.substr(0, 60) + "..." : text;
}

}  // namespace

ConfigReader::ConfigReader(std::string where, const json& object)
    : where_(std::move(where)), object_(object) {
  check(object.is_object(), where_, " is ", shown(object), ", expected an object");
}

bool ConfigReader::has(const char* key) const {
  const auto found = object_.find(key);
  return found != object_.end() && !found->is_null();
}

bool ConfigReader::is_null(const char* key) {
  taken_.insert(key);
  const auto found = object_.find(key);
  return found != object_.end() && found->is_null();
}

const json* ConfigReader::find(const char* key) {
  taken_.insert(key);
  const auto found = object_.find(key);
  return found == object_.end() || found->is_null() ? nullptr : &*found;
}

int64_t ConfigReader::integer(const char* key, std::optional<int64_t> fallback) {
  const json* const value = find(key);
  check(value || fallback, where_, " has no ", key);
  if (!value) return *fallback;
  constexpr int64_t kMost = (int64_t{1} << 31) - 1;
  const bool fits = value->is_number_unsigned() && value->get<uint64_t>() <= uint64_t(kMost);
  check(fits, where_, ": ", key, " is ", shown(*value), ", expected a whole number of 0 ... ", kMost);
  return value->get<int64_t>();
}

double ConfigReader::number(const char* key, std::optional<double> fallback) {
  const json* const value = find(key);
  check(value || fallback, where_, " has no ", key);
  if (!value) return *fallback;
  check(value->is_number() && std::isfinite(value->get<double>()), where_, ": ", key, " is ", shown(*value),
        ", expected a number");
  return value->get<double>();
}

bool ConfigReader::flag(const char* key, std::optional<bool> fallback) {
  const json* const value = find(key);
  check(value || fallback, where_, " has no ", key);
  if (!value) return *fallback;
  check(value->is_boolean(), where_, ": ", key, " is ", shown(*value), ", expected true or false");
  return value->get<bool>();
}

std::string ConfigReader::text(const char* key, const std::optional<std::string>& fallback) {
  const json* const value = find(key);
  check(value || fallback, where_, " has no ", key);
  if (!value) return *fallback;
  check(value->is_string(), where_, ": ", key, " is ", shown(*value), ", expected a string");
  return value->get<std::string>();
}

const json* ConfigReader::object(const char* key) {
  const json* const value = find(key);
  check(!value || value->is_object(), where_, ": ", key, " is ", value ? shown(*value) : "",
        ", expected an object");
  return value;
}

std::vector<double> ConfigReader::numbers(const char* key, int64_t count) {
  const json* const value = find(key);
  check(value != nullptr, where_, " has no ", key);
  check(value->is_array() && int64_t(value->size()) == count, where_, ": ", key, " is ", shown(*value),
        ", expected a list of ", count, " numbers");
  std::vector<double> numbers;
  for (const json& number : *value) {
    check(number.is_number() && std::isfinite(number.get<double>()), where_, ": ", key, " holds ",
          shown(number), ", expected numbers");
    numbers.push_back(number.get<double>());
  }
  return numbers;
}

const json* ConfigReader::any(const char* key) {
  return find(key);
}

void ConfigReader::expect(const char* key, const json& value, const char* meaning) {
  const json* const found = find(key);
  check(!found || *found == value, where_, ": ", key, " is ", found ? shown(*found) : "", "; only ",
        shown(value), " is supported (", meaning, ")");
}

void ConfigReader::ignore(std::initializer_list<const char*> keys) {
  taken_.insert(keys.begin(), keys.end());
}

void ConfigReader::finish(const std::set<std::string>& ignored) const {
  for (const auto& [key, value] : object_.items()) {
    const bool known = taken_.contains(key) || ignored.contains(key) || key.starts_with("_");
    check(known, where_, ": the field ", shown(json(key)), " (", shown(value),
          ") is unknown and may change what the model computes; if it does not, take it out, by hand or with "
          "tessera convert --ignore-field ",
          shown(json(key)));
  }
}

}  // namespace tessera::pretrained
