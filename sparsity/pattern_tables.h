#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "report/table.h"
#include "sparsity/patterns.h"

namespace tessera::sparsity {

/// The rows of the tables of sparsity.sqlite (docs/sparsity_patterns.md), filled matrix by matrix
/// (sparsity/pattern_rows.h).
struct PatternTables {
  using Rows = std::vector<std::vector<report::TableCell>>;
  Rows matrices, features, neighbours, distances, clusters, labels, statistics, pairs, quantiles, nulls,
      perplexity, maps, bits, bytes, skipped, input_norms;
  size_t bits_text = 0;
  std::string norms_from;  // "": of no dense model
};

/// A number of a table; nothing in the place of one that is not finite.
report::TableCell finite_cell(double value);
/// "8,16,32".
std::string sizes_text(const std::vector<int64_t>& sizes);
/// The bytes of a database with the tables, and with a view per input and projection.
std::string database_bytes(const PatternTables& tables, const AnalyzeOptions& options);

}  // namespace tessera::sparsity
