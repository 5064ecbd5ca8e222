#include "report/database.h"

#include <chrono>
#include <cmath>
#include <limits>
#include <string_view>

#include "runtime/error.h"

#if defined(TESSERA_WITH_SQLITE)
#include <sqlite3.h>
#endif

namespace tessera::report {

#if defined(TESSERA_WITH_SQLITE)

namespace fs = std::filesystem;

struct Database::Handle {
  sqlite3* connection = nullptr;
  std::string name;

  ~Handle() { sqlite3_close(connection); }
  [[noreturn]] void fail() const { fail_at(Site::here(), name, ": ", sqlite3_errmsg(connection)); }
};

namespace {

std::unique_ptr<sqlite3_stmt, decltype(&sqlite3_finalize)> prepared(sqlite3* connection,
                                                                    const std::string& sql,
                                                                    const char** rest = nullptr) {
  sqlite3_stmt* statement = nullptr;
  sqlite3_prepare_v2(connection, sql.c_str(), int(sql.size()) + 1, &statement, rest);
  return {statement, &sqlite3_finalize};
}

void bind(sqlite3_stmt* statement, int index, const TableCell& value) {
  if (const auto* integer = std::get_if<int64_t>(&value)) sqlite3_bind_int64(statement, index, *integer);
  if (const auto* number = std::get_if<double>(&value); number && std::isfinite(*number))
    sqlite3_bind_double(statement, index, *number);
  if (const auto* text = std::get_if<std::string>(&value))
    sqlite3_bind_text(statement, index, text->data(), int(text->size()), SQLITE_TRANSIENT);
}

TableCell value_of(sqlite3_stmt* statement, int column) {
  switch (sqlite3_column_type(statement, column)) {
    case SQLITE_INTEGER:
      return int64_t{sqlite3_column_int64(statement, column)};
    case SQLITE_FLOAT:
      return sqlite3_column_double(statement, column);
    case SQLITE_NULL:
      return {};
    default: {
      const auto* const text = static_cast<const char*>(sqlite3_column_blob(statement, column));
      return std::string(text ? text : "", size_t(sqlite3_column_bytes(statement, column)));
    }
  }
}

/// Steps to the end; false if the database reports an error.
bool collect(sqlite3_stmt* statement, Table& rows, int64_t most_rows) {
  const int columns = sqlite3_column_count(statement);
  for (int column = 0; column < columns; ++column)
    rows.columns.emplace_back(sqlite3_column_name(statement, column));
  int code = SQLITE_ROW;
  while ((code = sqlite3_step(statement)) == SQLITE_ROW) {
    check(int64_t(rows.rows.size()) < most_rows, "query: more than ", most_rows,
          " rows; add LIMIT, or allow more with --rows");
    auto& row = rows.rows.emplace_back();
    for (int column = 0; column < columns; ++column) row.push_back(value_of(statement, column));
  }
  return code == SQLITE_DONE;
}

/// What a query may do: read. Attaching, pragmas and all writes are refused.
int authorize(void*, int action, const char*, const char*, const char*, const char*) {
  const bool reads = action == SQLITE_SELECT || action == SQLITE_READ || action == SQLITE_FUNCTION ||
                     action == SQLITE_RECURSIVE;
  return reads ? SQLITE_OK : SQLITE_DENY;
}

struct Deadline {
  std::chrono::steady_clock::time_point at;
  static int passed(void* deadline) {
    return std::chrono::steady_clock::now() >= static_cast<const Deadline*>(deadline)->at;
  }
};

}  // namespace

Database::Database(std::unique_ptr<Handle> handle) : handle_(std::move(handle)) {}
Database::Database(Database&&) noexcept = default;
Database::~Database() = default;

Database Database::open(const fs::path& path, const char* label) {
  auto handle = std::make_unique<Handle>();
  handle->name = std::string(label) + " " + path.string();
  if (sqlite3_open(path.c_str(), &handle->connection) != SQLITE_OK) handle->fail();
  sqlite3_busy_timeout(handle->connection, 10'000);  // another process may be writing
  return Database(std::move(handle));
}

Database Database::in_memory() {
  return open(":memory:", "database");
}

Database Database::read_only(const fs::path& path, int32_t application_id, const char* what) {
  std::error_code ignored;
  check(fs::is_regular_file(path, ignored), "database ", path.string(), ": there is no such file; expected ",
        what);
  auto handle = std::make_unique<Handle>();
  handle->name = "database " + path.string();
  if (sqlite3_open_v2(path.c_str(), &handle->connection, SQLITE_OPEN_READONLY, nullptr) != SQLITE_OK)
    handle->fail();
  Table found;
  const auto statement = prepared(handle->connection, "PRAGMA application_id");
  const bool read = statement && collect(statement.get(), found, 1);
  check(read && !found.rows.empty() && found.rows[0][0] == TableCell(int64_t{application_id}), "database ",
        path.string(), read ? ": it was made by another program" : ": it is no SQLite database",
        "; expected ", what);
  return Database(std::move(handle));
}

Table Database::run(const std::string& sql, const std::vector<TableCell>& values) {
  const auto statement = prepared(handle_->connection, sql);
  if (!statement) handle_->fail();
  for (size_t i = 0; i < values.size(); ++i) bind(statement.get(), int(i) + 1, values[i]);
  Table rows;
  if (!collect(statement.get(), rows, std::numeric_limits<int64_t>::max())) handle_->fail();
  return rows;
}

void Database::insert(const std::string& sql, const std::vector<std::vector<TableCell>>& rows) {
  const auto statement = prepared(handle_->connection, sql);
  if (!statement) handle_->fail();
  for (const auto& row : rows) {
    for (size_t i = 0; i < row.size(); ++i) bind(statement.get(), int(i) + 1, row[i]);
    if (sqlite3_step(statement.get()) != SQLITE_DONE) handle_->fail();
    sqlite3_reset(statement.get());
    sqlite3_clear_bindings(statement.get());
  }
}

Table Database::query(const std::string& sql, double seconds, int64_t most_rows) {
  const char* rest = nullptr;
  sqlite3_set_authorizer(handle_->connection, authorize, nullptr);
  const auto statement = prepared(handle_->connection, sql, &rest);
  sqlite3_set_authorizer(handle_->connection, nullptr, nullptr);
  if (!statement && sqlite3_errcode(handle_->connection) == SQLITE_AUTH)
    fail_at(Site::here(), "query: it does more than read (", sqlite3_errmsg(handle_->connection),
            "); expected one SELECT");
  if (!statement && sqlite3_errcode(handle_->connection) != SQLITE_OK)
    fail_at(Site::here(), "query: ", sqlite3_errmsg(handle_->connection));
  check(statement != nullptr, "query: it is empty; expected one SELECT");
  check(std::string_view(rest).find_first_not_of(" \t\r\n;") == std::string_view::npos,
        "query: more than one statement; expected one SELECT");
  check(sqlite3_stmt_readonly(statement.get()) != 0, "query: it would write; expected one SELECT");
  Deadline deadline{std::chrono::steady_clock::now() +
                    std::chrono::duration_cast<std::chrono::steady_clock::duration>(
                        std::chrono::duration<double>(seconds))};
  sqlite3_progress_handler(handle_->connection, 1000, Deadline::passed, &deadline);
  Table rows;
  const bool done = collect(statement.get(), rows, most_rows);
  sqlite3_progress_handler(handle_->connection, 0, nullptr, nullptr);
  if (!done && sqlite3_errcode(handle_->connection) == SQLITE_INTERRUPT)
    fail_at(Site::here(), "query: stopped after ", seconds, " s; ask for less, or allow more with --seconds");
  check(done, "query: ", sqlite3_errmsg(handle_->connection));
  return rows;
}

std::string Database::bytes() {
  sqlite3_int64 size = 0;
  unsigned char* const data = sqlite3_serialize(handle_->connection, "main", &size, 0);
  if (!data) handle_->fail();
  std::string copy(reinterpret_cast<const char*>(data), size_t(size));
  sqlite3_free(data);
  return copy;
}

#else

namespace {
[[noreturn]] void no_sqlite(const std::string& name) {
  fail_at(Site::here(), name, ": this build has no SQLite; install libsqlite3-dev and build again");
}
}  // namespace

struct Database::Handle {};

Database::Database(std::unique_ptr<Handle> handle) : handle_(std::move(handle)) {}
Database::Database(Database&&) noexcept = default;
Database::~Database() = default;
Database Database::open(const std::filesystem::path& path, const char* label) {
  no_sqlite(std::string(label) + " " + path.string());
}
Database Database::in_memory() {
  no_sqlite("database");
}
Database Database::read_only(const std::filesystem::path& path, int32_t, const char*) {
  no_sqlite("database " + path.string());
}
Table Database::run(const std::string&, const std::vector<TableCell>&) {
  no_sqlite("database");
}
void Database::insert(const std::string&, const std::vector<std::vector<TableCell>>&) {
  no_sqlite("database");
}
Table Database::query(const std::string&, double, int64_t) {
  no_sqlite("database");
}
std::string Database::bytes() {
  no_sqlite("database");
}

#endif

}  // namespace tessera::report
