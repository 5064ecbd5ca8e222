#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "report/table.h"

/// SQLite databases: written by statements with bound values, and asked by users' queries that can neither
/// write nor run for ever. In a build without SQLite (has_database(), report/run_table.h) every function
/// throws, and says what to install.

namespace tessera::report {

class Database {
 public:
  /// Opens for reading and writing; the file is created if missing. Errors begin with `label` and the path.
  static Database open(const std::filesystem::path& path, const char* label = "database");
  static Database in_memory();
  /// Opens a database that this program has made for reading: throws, naming the path, if there is no such
  /// file, if it is no SQLite database, or if its application_id is another ("expected <what>").
  static Database read_only(const std::filesystem::path& path, int32_t application_id, const char* what);
  Database(Database&&) noexcept;
  ~Database();

  /// One statement; ?1, ?2, ... are the values.
  Table run(const std::string& sql, const std::vector<TableCell>& values = {});
  /// Runs it once per row of values.
  void insert(const std::string& sql, const std::vector<std::vector<TableCell>>& rows);
  /// A single SELECT (or WITH ... SELECT) of a user. Throws if it would write, attach, or is more than one
  /// statement, if it runs longer than `seconds`, or gives more than `most_rows` rows.
  Table query(const std::string& sql, double seconds, int64_t most_rows);
  /// The bytes of the database file.
  std::string bytes();

 private:
  struct Handle;
  explicit Database(std::unique_ptr<Handle> handle);
  std::unique_ptr<Handle> handle_;
};

/// The application_id of a SQLite database, which says what program made it; 0 for another file, or
/// none at all. Needs no SQLite.
int32_t application_id_of(const std::filesystem::path& path);

/// A table of Markdown. CSV and JSON: report/table.h.
std::string to_markdown(const Table& table);

}  // namespace tessera::report
