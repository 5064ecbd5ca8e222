#include "report/run_table.h"

#include <memory>

#include "report/facts.h"
#include "report/sqlite_internal.h"
#include "runtime/error.h"

namespace tessera::report {

#if defined(TESSERA_WITH_SQLITE)

bool has_database() {
  return true;
}

void write_row(const std::filesystem::path& database, const RunRow& row) {
  sqlite3* handle = nullptr;
  const int code = sqlite3_open(database.c_str(), &handle);
  const std::unique_ptr<sqlite3, decltype(&sqlite3_close)> closes(handle, &sqlite3_close);
  check(code == SQLITE_OK, "results database ", database.string(), ": ", sqlite3_errmsg(handle));
  sqlite3_busy_timeout(handle, 10'000);  // another run may be writing its row
  Statement(database, handle,
            "CREATE TABLE IF NOT EXISTS runs (path TEXT PRIMARY KEY, model TEXT, status TEXT, started TEXT, "
            "updated TEXT, steps INTEGER, loss REAL, best_eval REAL, tokens_per_s REAL, device TEXT, "
            "revision TEXT, settings TEXT)")
      .run();
  Statement insert(database, handle,
                   "INSERT INTO runs VALUES (:path, :model, :status, :started, :updated, :steps, :loss, "
                   ":best, :rate, :device, :revision, :settings) ON CONFLICT(path) DO UPDATE SET "
                   "status=excluded.status, updated=excluded.updated, steps=excluded.steps, "
                   "loss=excluded.loss, best_eval=excluded.best_eval, "
                   "tokens_per_s=excluded.tokens_per_s, settings=excluded.settings");
  insert.bind(":path", row.path);
  insert.bind(":model", row.model);
  insert.bind(":status", row.status);
  insert.bind(":started", row.started);
  insert.bind(":updated", utc_now());
  insert.bind(":steps", row.steps);
  insert.bind(":loss", row.loss);
  insert.bind(":best", row.best_evaluation);
  insert.bind(":rate", row.tokens_per_s);
  insert.bind(":device", row.device);
  insert.bind(":revision", std::string(kRevision));
  insert.bind(":settings", row.settings);
  insert.run();
}
#else
bool has_database() {
  return false;
}

void write_row(const std::filesystem::path& database, const RunRow&) {
  fail_at(Site::here(), "results database ", database.string(),
          ": this build has no SQLite; install libsqlite3-dev and build again");
}
#endif

}  // namespace tessera::report
