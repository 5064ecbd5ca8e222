#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "io/utf8.h"
#include "report/database.h"

namespace tessera::report {
namespace {

std::string text_of(const Value& value) {
  if (const auto* integer = std::get_if<int64_t>(&value)) return fmt::format("{}", *integer);
  if (const auto* number = std::get_if<double>(&value)) return fmt::format("{}", *number);
  if (const auto* text = std::get_if<std::string>(&value)) return io::utf8_text(*text);
  return "";
}

std::string csv_field(const std::string& text) {
  if (text.find_first_of(",\"\n\r") == std::string::npos) return text;
  std::string quoted = "\"";
  for (const char c : text) quoted += c == '"' ? std::string("\"\"") : std::string(1, c);
  return quoted + "\"";
}

/// One line, with the bars that would end a cell escaped.
std::string cell(const std::string& text) {
  std::string out;
  for (const char c : text) {
    if (c == '|') out += '\\';
    out += c == '\n' || c == '\r' ? ' ' : c;
  }
  return out;
}

}  // namespace

std::string to_markdown(const Rows& rows) {
  std::string out = "|", rule = "|";
  for (const std::string& column : rows.columns) out += " " + cell(column) + " |", rule += "---|";
  out += "\n" + rule + "\n";
  for (const auto& row : rows.rows) {
    out += "|";
    for (const Value& value : row) out += " " + cell(text_of(value)) + " |";
    out += "\n";
  }
  return out;
}

std::string to_csv(const Rows& rows) {
  std::string out;
  const auto add_line = [&](const auto& values, const auto& text) {
    for (size_t i = 0; i < values.size(); ++i) out += (i > 0 ? "," : "") + csv_field(text(values[i]));
    out += "\n";
  };
  add_line(rows.columns, [](const std::string& column) { return column; });
  for (const auto& row : rows.rows) add_line(row, text_of);
  return out;
}

std::string to_json(const Rows& rows) {
  nlohmann::ordered_json all = nlohmann::ordered_json::array();
  for (const auto& row : rows.rows) {
    nlohmann::ordered_json object = nlohmann::ordered_json::object();
    for (size_t i = 0; i < row.size(); ++i) {
      auto& to = object[rows.columns[i]];
      if (const auto* integer = std::get_if<int64_t>(&row[i])) to = *integer;
      if (const auto* number = std::get_if<double>(&row[i])) to = *number;
      if (const auto* text = std::get_if<std::string>(&row[i])) to = io::utf8_text(*text);
    }
    all.push_back(std::move(object));
  }
  return all.dump(1) + "\n";
}

}  // namespace tessera::report
