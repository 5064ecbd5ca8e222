#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

/// SQLite databases: written by statements with bound values, and asked by users' queries that can neither
/// write nor run for ever. In a build without SQLite every function throws, and says what to install.

namespace tessera::report {

/// Whether this build has SQLite.
bool has_database();

/// A value of a row; nothing is NULL. A double that is not finite is stored as NULL.
using Value = std::variant<std::monostate, int64_t, double, std::string>;

/// What a query gives.
struct Rows {
  std::vector<std::string> columns;
  std::vector<std::vector<Value>> rows;
};

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
  Rows run(const std::string& sql, const std::vector<Value>& values = {});
  /// Runs it once per row of values.
  void insert(const std::string& sql, const std::vector<std::vector<Value>>& rows);
  /// A single SELECT (or WITH ... SELECT) of a user. Throws if it would write, attach, or is more than one
  /// statement, if it runs longer than `seconds`, or gives more than `most_rows` rows.
  Rows query(const std::string& sql, double seconds, int64_t most_rows);
  /// The bytes of the database file.
  std::string bytes();

 private:
  struct Handle;
  explicit Database(std::unique_ptr<Handle> handle);
  std::unique_ptr<Handle> handle_;
};

/// Rows as text: a table of Markdown, CSV (RFC 4180: quotes where they are needed, lines end in \n), or a JSON
/// array of objects. Numbers have as many digits as it takes to read them back.
std::string to_markdown(const Rows& rows);
std::string to_csv(const Rows& rows);
std::string to_json(const Rows& rows);

}  // namespace tessera::report
