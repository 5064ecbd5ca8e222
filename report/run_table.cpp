#include "report/run_table.h"

#include "report/database.h"
#include "report/facts.h"
#include "report/table.h"

namespace tessera::report {

bool has_database() {
#if defined(TESSERA_WITH_SQLITE)
  return true;
#else
  return false;
#endif
}

void write_row(const std::filesystem::path& database, const RunRow& row) {
  Database runs = Database::open(database, "results database");
  runs.run(
      "CREATE TABLE IF NOT EXISTS runs (path TEXT PRIMARY KEY, model TEXT, status TEXT, started TEXT, "
      "updated TEXT, steps INTEGER, loss REAL, best_eval REAL, tokens_per_s REAL, device TEXT, "
      "revision TEXT, settings TEXT)");
  runs.run(
      "INSERT INTO runs VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12) ON CONFLICT(path) DO "
      "UPDATE SET model=excluded.model, started=excluded.started, device=excluded.device, "
      "revision=excluded.revision, status=excluded.status, updated=excluded.updated, steps=excluded.steps, "
      "loss=excluded.loss, best_eval=excluded.best_eval, tokens_per_s=excluded.tokens_per_s, "
      "settings=excluded.settings",
      {row.path, row.model, row.status, row.started, utc_now(), row.steps, cell_of(row.loss),
       cell_of(row.best_evaluation), cell_of(row.tokens_per_s), row.device, std::string(kRevision),
       row.settings});
}

}  // namespace tessera::report
