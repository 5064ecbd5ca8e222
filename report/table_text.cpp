#include <fmt/format.h>

#include "io/file.h"
#include "io/utf8.h"
#include "report/database.h"

namespace tessera::report {
namespace {

std::string text_of(const TableCell& value) {
  if (const auto* integer = std::get_if<int64_t>(&value)) return fmt::format("{}", *integer);
  if (const auto* number = std::get_if<double>(&value)) return fmt::format("{}", *number);
  if (const auto* text = std::get_if<std::string>(&value)) return io::utf8_text(*text);
  return "";
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

int32_t application_id_of(const std::filesystem::path& path) {
  constexpr uint64_t kHeader = 100, kPlace = 68;  // SQLite's file format; the number is big-endian
  std::error_code ignored;
  if (!std::filesystem::is_regular_file(path, ignored) || std::filesystem::file_size(path, ignored) < kHeader)
    return 0;
  unsigned char id[4];
  io::InputFile(path.string()).read(kPlace, id, sizeof id);
  return int32_t(uint32_t(id[0]) << 24 | uint32_t(id[1]) << 16 | uint32_t(id[2]) << 8 | id[3]);
}

std::string to_markdown(const Table& table) {
  std::string out = "|", rule = "|";
  for (const std::string& column : table.columns) out += " " + cell(column) + " |", rule += "---|";
  out += "\n" + rule + "\n";
  for (const auto& row : table.rows) {
    out += "|";
    for (const TableCell& value : row) out += " " + cell(text_of(value)) + " |";
    out += "\n";
  }
  return out;
}

}  // namespace tessera::report
