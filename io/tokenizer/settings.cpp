#include "io/safetensors_internal.h"
#include "io/tokenizer/settings_internal.h"
#include "runtime/error.h"

namespace tessera::io {

void Settings::wrong(const std::string& expected) const {
  const char* const type = value_->is_null()      ? "null"
                           : value_->is_object()  ? "an object"
                           : value_->is_array()   ? "a list"
                           : value_->is_string()  ? "a string"
                           : value_->is_boolean() ? "true or false"
                                                  : "a number";
  fail_at(Site::here(), "tokenizer: ", where_, " is ", type, ", expected ", expected);
}

void Settings::refuse_type(const std::string& expected) const {
  fail_at(Site::here(), "tokenizer: ", where_, " is of type \"", shown(type()),
          "\", which is not supported; expected ", expected);
}

bool Settings::has(const std::string& key) const {
  if (!value_->is_object()) wrong("an object");
  const auto found = value_->find(key);
  return found != value_->end() && !found->is_null();
}

Settings Settings::at(const std::string& key) const {
  check(has(key), "tokenizer: ", where_, " has no \"", key, "\"");
  return {value_->at(key), where_ + (where_.ends_with(": ") ? "" : ".") + key};
}

std::vector<Settings> Settings::items() const {
  if (!value_->is_array()) wrong("a list");
  std::vector<Settings> all;
  for (size_t i = 0; i < value_->size(); ++i)
    all.emplace_back((*value_)[i], where_ + "[" + std::to_string(i) + "]");
  return all;
}

std::vector<Settings> Settings::list(const std::string& key) const {
  return at(key).items();
}

std::string Settings::text() const {
  if (!value_->is_string()) wrong("a string");
  return value_->get<std::string>();
}

std::string Settings::text(const std::string& key, const std::string& otherwise) const {
  return has(key) ? at(key).text() : otherwise;
}

std::optional<std::string> Settings::maybe_text(const std::string& key) const {
  if (!has(key)) return std::nullopt;
  return at(key).text();
}

bool Settings::flag() const {
  if (!value_->is_boolean()) wrong("true or false");
  return value_->get<bool>();
}

bool Settings::flag(const std::string& key, bool otherwise) const {
  return has(key) ? at(key).flag() : otherwise;
}

int64_t Settings::number(int64_t least, int64_t most) const {
  const std::string expected = "a whole number from " + std::to_string(least) + " to " + std::to_string(most);
  if (!value_->is_number_integer()) wrong(expected);
  const bool large = value_->is_number_unsigned() && value_->get<uint64_t>() > uint64_t(INT64_MAX);
  const int64_t value = large ? INT64_MAX : value_->get<int64_t>();
  check(!large && value >= least && value <= most, "tokenizer: ", where_, " is ", value_->dump(),
        ", expected ", expected);
  return value;
}

}  // namespace tessera::io
