#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>

/// The SQLite database of runs, runs.sqlite.

namespace tessera::report {

/// Whether this build has SQLite.
bool has_database();

/// One run. Texts are UTF-8.
struct RunRow {
  std::string path;    // of the run folder, absolute: the primary key
  std::string model;   // "tnp", "gpt", ...
  std::string status;  // "running", "finished", "interrupted", "failed"
  std::string started;
  int64_t steps = 0;
  std::optional<double> loss, best_evaluation, tokens_per_s;  // nothing: NULL
  std::string device;
  std::string settings;  // JSON
};

/// Writes the row into the table `runs` of `database`, which is created if missing, together with the time
/// and this build's revision; a row of the same path is updated (model, start, device and revision stay).
/// Throws, naming the database, if it cannot be written or the build has no SQLite.
void write_row(const std::filesystem::path& database, const RunRow& row);

}  // namespace tessera::report
