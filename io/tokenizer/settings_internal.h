#pragma once

#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

/// JSON that is not trusted: every access says what it expects, and an error names the place ("x.json:
/// post_processor.single[0].Sequence").

namespace tessera::io {

class Settings {
 public:
  Settings(const nlohmann::json& value, std::string where) : value_(&value), where_(std::move(where)) {}

  const std::string& where() const { return where_; }
  const nlohmann::json& json() const { return *value_; }
  /// Whether the part is there and not null. Throws if this is no object.
  bool has(const std::string& key) const;
  Settings at(const std::string& key) const;
  std::vector<Settings> list(const std::string& key) const;
  std::vector<Settings> items() const;
  std::string text() const;
  std::string text(const std::string& key) const { return at(key).text(); }
  std::string text(const std::string& key, const std::string& otherwise) const;
  /// A string, or nothing where it is absent or null.
  std::optional<std::string> maybe_text(const std::string& key) const;
  bool flag() const;
  bool flag(const std::string& key, bool otherwise) const;
  int64_t number(int64_t least, int64_t most) const;
  int64_t number(const std::string& key, int64_t least, int64_t most) const {
    return at(key).number(least, most);
  }
  int64_t number(const std::string& key, int64_t otherwise, int64_t least, int64_t most) const {
    return has(key) ? at(key).number(least, most) : otherwise;
  }
  /// The part "type" of a component.
  std::string type() const { return text("type"); }
  [[noreturn]] void refuse_type(const std::string& expected) const;
  /// Throws: "<where> is <what it is>, expected <expected>".
  [[noreturn]] void wrong(const std::string& expected) const;

 private:
  const nlohmann::json* value_;
  std::string where_;
};

}  // namespace tessera::io
