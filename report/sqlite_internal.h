#pragma once

#if defined(TESSERA_WITH_SQLITE)
#include <sqlite3.h>

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>

#include "runtime/error.h"

namespace tessera::report {

/// A prepared statement of a database file, and the values bound to it.
class Statement {
 public:
  Statement(const std::filesystem::path& path, sqlite3* handle, const std::string& sql)
      : path_(path), handle_(handle) {
    if (sqlite3_prepare_v2(handle_, sql.c_str(), -1, &statement_, nullptr) != SQLITE_OK) fail();
  }
  ~Statement() { sqlite3_finalize(statement_); }
  Statement(const Statement&) = delete;

  void bind(const char* name, const std::string& text) { bind(index(name), text); }
  void bind(const char* name, int64_t number) { bind(index(name), number); }
  void bind(const char* name, const std::optional<double>& number) {
    if (number) bind(index(name), *number);  // what is not bound is NULL
  }
  /// By their position, from 1 on.
  void bind(int index, const std::string& text) {
    sqlite3_bind_text(statement_, index, text.data(), int(text.size()), SQLITE_TRANSIENT);
  }
  void bind(int index, int64_t number) { sqlite3_bind_int64(statement_, index, number); }
  void bind(int index, double number) { sqlite3_bind_double(statement_, index, number); }
  void run() {
    const int code = sqlite3_step(statement_);
    if (code != SQLITE_DONE && code != SQLITE_ROW) fail();
  }

 private:
  int index(const char* name) const { return sqlite3_bind_parameter_index(statement_, name); }
  [[noreturn]] void fail() {
    fail_at(Site::here(), "results database ", path_.string(), ": ", sqlite3_errmsg(handle_));
  }
  const std::filesystem::path& path_;
  sqlite3* handle_;
  sqlite3_stmt* statement_ = nullptr;
};

}  // namespace tessera::report
#endif
