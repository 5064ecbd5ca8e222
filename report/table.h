#pragma once

#include <cstdint>
#include <filesystem>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <variant>
#include <vector>

/// Tables of results, written as CSV, JSON and SQLite. The same tables give the same bytes.

namespace tessera::report {

/// Nothing, a number or a text (UTF-8). A NaN is written as nothing, which SQLite makes of it; an infinity as
/// inf or -inf, but as null in JSON.
using TableCell = std::variant<std::monostate, int64_t, double, std::string>;

/// The number of a cell, NaN if it has none; its text, "" if it has none; the whole number that it must have.
double number_in(const TableCell& cell);
std::string text_in(const TableCell& cell);
int64_t integer_in(const TableCell& cell);
TableCell cell_of(const std::optional<double>& number);

struct Table {
  std::string name;  // of the table in a database
  std::vector<std::string> columns;
  std::vector<std::vector<TableCell>> rows;  // as long as `columns`
};

/// With a header line; texts are quoted where they need it (RFC 4180), numbers are the shortest that read
/// back as they are.
std::string csv_text(const Table& table);
/// An array with an object per row; nothing is null.
nlohmann::json to_json(const Table& table);
/// Writes a SQLite database of these tables, in place of one that is there. Throws, naming it, if it cannot
/// be written or the build has no SQLite (has_database(), report/run_table.h).
void write_database(const std::filesystem::path& path, const std::vector<Table>& tables);

}  // namespace tessera::report
