#pragma once

#include <string>

#include "report/database.h"

namespace tessera::sparsity {

/// Throws, and says what to do, if the tables are those of another version (kPatternsVersion).
void check_version(report::Database& database);

/// One self-contained HTML page of a sparsity.sqlite: no network and no other file; its data are the
/// database's tables as JSON in an element "data". The same database gives the same bytes.
std::string page_of(report::Database& database);

/// The JSON that the page holds: {table: [{column: value, ...}, ...], ...} and "sql": {figure: query, ...}.
std::string page_data(report::Database& database);

}  // namespace tessera::sparsity
