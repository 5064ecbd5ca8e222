#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "sparsity/features.h"
#include "sparsity/pattern_source.h"
#include "sparsity/pattern_tables.h"

/// What is found in a matrix, and in a pair of them, as rows of tables.

namespace tessera::sparsity {

/// The features of one matrix in one input that are compared with each other.
struct PatternPool {
  int64_t id = 0;
  std::string matrix;
  std::vector<int64_t> chosen;
  Features features;
  Tensor values, overlaps;
};

/// Adds the rows of a matrix, whose number is `id`.
PatternPool analyze_matrix(PatternTables& tables, const PatternSource& source, int64_t id,
                           const std::string& name, const Mask& mask, const AnalyzeOptions& options);
/// Adds the rows of one matrix in two inputs.
void add_pair(PatternTables& tables, const PatternPool& a, const PatternPool& b,
              const PatternOptions& options);
/// Corrects the p-values of the table `nulls` over all subjects with one statistic and null model.
void correct_levels(PatternTables::Rows& nulls);

}  // namespace tessera::sparsity
