#include "cli/toml.h"

#include <toml++/toml.h>

#include <algorithm>
#include <cctype>
#include <string_view>

#include "cli/commands.h"
#include "io/file.h"

namespace tessera::cli {
namespace {

constexpr uint64_t kLargestToml = 1 << 20;

class TomlReader {
 public:
  /// `text` must outlive the reader.
  TomlReader(const std::string& path, std::string_view text) : path_(path) {
    for (size_t begin = 0; begin <= text.size();) {
      const size_t end = std::min(text.find('\n', begin), text.size());
      lines_.push_back(text.substr(begin, end - begin));
      begin = end + 1;
    }
    try {
      root_ = toml::parse(text, path);
    } catch (const toml::parse_error& error) {
      std::string why(error.description());
      constexpr std::string_view kBegin = "Error while parsing ";
      if (why.starts_with(kBegin)) why.replace(0, kBegin.size(), "while parsing ");
      std::ranges::replace(why, '\n', ' ');
      throw UsageError(place_in(path, error.source().begin.line) + "not valid TOML: " + why +
                       "; expected lines such as key = 3, key = \"text\" and key = [1, 2]");
    }
  }

  std::vector<TomlSection> sections() {
    add("", 0, root_);
    std::ranges::stable_sort(sections_, {}, &TomlSection::line);  // a table has its entries by their names
    for (TomlSection& section : sections_) std::ranges::stable_sort(section.entries, {}, &TomlEntry::line);
    return std::move(sections_);
  }

 private:
  /// Adds the section of a table and, as sections of their own, the tables in it.
  void add(const std::string& name, uint32_t line, const toml::table& table) {
    TomlSection section{.name = name, .line = line, .entries = {}};
    bool holds_tables = false;
    for (const auto& [key, node] : table) {
      const std::string own(key.str());
      const std::string path = name.empty() ? own : name + "." + own;
      const uint32_t at = node.source().begin.line;
      if (const toml::table* const inner = node.as_table()) {
        add(path, at, *inner);
      } else if (node.is_array_of_tables()) {
        for (const toml::node& element : *node.as_array())
          add(path, element.source().begin.line, *element.as_table());
      } else {
        section.entries.push_back(entry_of(own, node));
        continue;
      }
      holds_tables = true;
    }
    // In [a.b] alone there is no section [a].
    if (name.empty() || !section.entries.empty() || !holds_tables) sections_.push_back(std::move(section));
  }

  TomlEntry entry_of(const std::string& name, const toml::node& node) const {
    TomlEntry entry{
        .name = name, .values = {}, .is_array = node.is_array(), .line = node.source().begin.line};
    if (const toml::array* const array = node.as_array()) {
      for (const toml::node& element : *array) entry.values.push_back(text_of(name, element));
    } else {
      entry.values.push_back(text_of(name, node));
    }
    return entry;
  }

  std::string text_of(const std::string& name, const toml::node& node) const {
    if (const auto* const text = node.as_string()) return text->get();
    if (const auto* const value = node.as_boolean()) return value->get() ? "true" : "false";
    if (const auto* const value = node.as_integer()) {
      const std::string written = number_at(node.source().begin);
      const bool decimal =
          written.find_first_not_of("0123456789", written.starts_with('-') ? 1 : 0) == std::string::npos;
      return decimal && !written.empty() ? written : std::to_string(value->get());
    }
    if (node.is_floating_point()) return number_at(node.source().begin);
    throw UsageError(place_in(path_, node.source().begin.line) + "\"" + name +
                     "\": expected a number, a text, true or false, or an array of these");
  }

  /// The number that begins at the position, whose columns count characters.
  std::string number_at(const toml::source_position& at) const {
    const std::string_view line = lines_.at(at.line - 1);
    size_t begin = 0;
    for (uint32_t column = 1; column < at.column && begin < line.size(); ++column) {
      ++begin;
      while (begin < line.size() && (uint8_t(line[begin]) & 0xC0) == 0x80) ++begin;
    }
    std::string number;
    for (size_t i = begin; i < line.size(); ++i) {
      const char c = line[i];
      if (c == '_' || (c == '+' && i == begin)) continue;
      if (!std::isalnum(uint8_t(c)) && c != '+' && c != '-' && c != '.') break;
      number += c;
    }
    return number;
  }

  const std::string& path_;
  std::vector<std::string_view> lines_;
  toml::table root_;
  std::vector<TomlSection> sections_;
};

}  // namespace

std::string place_in(const std::string& path, uint32_t line) {
  return path + ":" + std::to_string(line) + ": ";
}

std::vector<TomlSection> read_toml(const std::string& path) {
  std::string text = io::read_file(path, kLargestToml);
  if (text.starts_with("\xEF\xBB\xBF")) text.erase(0, 3);
  return TomlReader(path, text).sections();
}

}  // namespace tessera::cli
