#pragma once

#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "runtime/error.h"

/// An object of JSON whose fields are asked for one by one; fields that are not asked for are an error.

namespace tessera::pretrained {

class ConfigReader {
 public:
  /// `where`: of messages, "config.json" or "config.json: rope_scaling". The object must outlive the reader.
  ConfigReader(std::string where, const nlohmann::json& object);

  /// Present and not null.
  bool has(const char* key) const;
  /// Takes the field. Present and null, which for some fields is another value than absent.
  bool is_null(const char* key);
  /// Each takes the field, which is absent (or null) only if there is a fallback. Throws for another type;
  /// integers are whole numbers of 0 ... 2^31 - 1.
  int64_t integer(const char* key, std::optional<int64_t> fallback = {});
  double number(const char* key, std::optional<double> fallback = {});
  bool flag(const char* key, std::optional<bool> fallback = {});
  std::string text(const char* key, const std::optional<std::string>& fallback = {});
  /// The object of that name, or null if it is absent.
  const nlohmann::json* object(const char* key);
  /// A list of `count` numbers.
  std::vector<double> numbers(const char* key, int64_t count);
  /// The field as it is, or null.
  const nlohmann::json* any(const char* key);
  /// Throws, saying what it would mean, unless the field is absent or has that value.
  void expect(const char* key, const nlohmann::json& value, const char* meaning);
  /// Fields that change nothing.
  void ignore(std::initializer_list<const char*> keys);
  /// Throws if a field was not asked for, unless it begins with '_' or is in `ignored`.
  void finish(const std::set<std::string>& ignored = {}) const;
  const std::string& where() const { return where_; }

 private:
  const nlohmann::json* find(const char* key);
  std::string where_;
  const nlohmann::json& object_;
  std::set<std::string> taken_;
};

}  // namespace tessera::pretrained
