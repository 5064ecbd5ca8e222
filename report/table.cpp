#include "report/table.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>

#include "io/file.h"
#include "io/utf8.h"
#include "report/database.h"

namespace tessera::report {
namespace {

std::string csv_cell(const TableCell& cell) {
  if (const auto* const whole = std::get_if<int64_t>(&cell)) return fmt::format("{}", *whole);
  if (const auto* const number = std::get_if<double>(&cell))
    return std::isnan(*number) ? "" : fmt::format("{}", *number);
  if (std::holds_alternative<std::monostate>(cell)) return "";
  const std::string text = io::utf8_text(std::get<std::string>(cell));
  if (text.find_first_of(",\"\r\n") == std::string::npos) return text;
  std::string quoted = "\"";
  for (const char c : text) quoted += c == '"' ? std::string("\"\"") : std::string(1, c);
  return quoted + "\"";
}

template <class Cells, class Text>
std::string csv_line(const Cells& cells, Text&& text) {
  std::string line;
  for (size_t i = 0; i < cells.size(); ++i) line += (i == 0 ? "" : ",") + text(cells[i]);
  return line + "\n";
}

}  // namespace

double number_in(const TableCell& cell) {
  if (const auto* const whole = std::get_if<int64_t>(&cell)) return double(*whole);
  const auto* const number = std::get_if<double>(&cell);
  return number ? *number : std::numeric_limits<double>::quiet_NaN();
}

std::string text_in(const TableCell& cell) {
  const auto* const text = std::get_if<std::string>(&cell);
  return text ? *text : "";
}

int64_t integer_in(const TableCell& cell) {
  return std::get<int64_t>(cell);
}

TableCell cell_of(const std::optional<double>& number) {
  return number ? TableCell(*number) : TableCell();
}

std::string csv_text(const Table& table) {
  std::string text = csv_line(table.columns, [](const std::string& name) { return csv_cell(name); });
  for (const auto& row : table.rows) text += csv_line(row, csv_cell);
  return text;
}

nlohmann::json to_json(const Table& table) {
  for (const std::string& name : table.columns)
    check(std::ranges::count(table.columns, name) == 1, "table: two columns are named \"", name,
          "\", and an object of JSON holds one; rename one of them (SELECT ... AS ...)");
  nlohmann::json rows = nlohmann::json::array();
  for (const auto& row : table.rows) {
    nlohmann::json entry = nlohmann::json::object();
    for (size_t i = 0; i < row.size(); ++i) {
      nlohmann::json& value = entry[io::utf8_text(table.columns[i])] = nullptr;
      if (const auto* const whole = std::get_if<int64_t>(&row[i])) value = *whole;
      if (const auto* const number = std::get_if<double>(&row[i]); number && std::isfinite(*number))
        value = *number;
      if (const auto* const text = std::get_if<std::string>(&row[i])) value = io::utf8_text(*text);
    }
    rows.push_back(std::move(entry));
  }
  return rows;
}

namespace {

/// As an identifier of SQL.
std::string sql_name(const std::string& name) {
  std::string quoted = "\"";
  for (const char c : name) quoted += c == '"' ? std::string("\"\"") : std::string(1, c);
  return quoted + "\"";
}

void insert_table(Database& database, const Table& table) {
  const auto listed = [&](auto&& text) {
    std::string list = csv_line(table.columns, text);
    list.pop_back();
    return "(" + list + ")";
  };
  database.run("CREATE TABLE " + sql_name(table.name) + " " + listed(sql_name));
  auto rows = table.rows;
  for (auto& row : rows)
    for (TableCell& cell : row)
      if (auto* const text = std::get_if<std::string>(&cell)) *text = io::utf8_text(*text);
  database.insert("INSERT INTO " + sql_name(table.name) + " VALUES " +
                      listed([](const std::string&) { return std::string("?"); }),
                  rows);
}

}  // namespace

void write_database(const std::filesystem::path& path, const std::vector<Table>& tables) {
  // Made in memory and written as a whole: a reader finds the former database or this one.
  Database database = Database::in_memory();
  for (const Table& table : tables) insert_table(database, table);
  io::write_file(path.string(), database.bytes());
}

}  // namespace tessera::report
