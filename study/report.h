#pragma once

#include <filesystem>
#include <string>

#include "study/results.h"

/// The files of a study's results:
///   cells.csv        a row per cell: status, score, loss, reason of a failure
///   curves.csv       every value that a cell logged, but for times and memory
///   comparisons.csv  the arms next to the baseline: scores, paired differences, p-values
///   results.json     the plan, cells and comparisons
///   times.csv, times.json   step times, and on which GPU and build each cell ran
///   study.sqlite     all these tables, if the build has SQLite
///   report.html      one self-contained page
/// The same plan gives the same bytes in all but the times, the database and the page, which have times.

namespace tessera::study {

/// Writes them all; returns the page's path.
std::filesystem::path write_report(const std::filesystem::path& folder, const Results& results);

/// The comparisons as a text for a terminal.
std::string format_comparisons(const Results& results);

}  // namespace tessera::study
