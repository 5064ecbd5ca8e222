#pragma once

#include <string>
#include <vector>

#include "report/database.h"

/// The comparative report of an analysis of patterns: how inputs differ per projection, how stable their
/// clusters are over executions, and what is beyond chance.

namespace tessera::sparsity {

/// A table of the report. `table.name` is its key in JSON.
struct ReportSection {
  std::string title, text;
  report::Table table;
};

/// Of a sparsity.sqlite of tessera sparsity analyze; throws as check_version does. Sections without rows,
/// such as the pairs of a single input, are left out.
std::vector<ReportSection> report_sections(report::Database& database);

/// "stable", "moderate" or "unstable": coefficients of variation, in %, below 30, below 50, and others. ""
/// for NaN.
const char* stability_of(double coefficient_of_variation);

/// With numbers of four significant digits.
std::string markdown_of(const std::vector<ReportSection>& sections);

}  // namespace tessera::sparsity
