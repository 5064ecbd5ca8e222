#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "sparsity/input_norms.h"
#include "sparsity/pattern_statistics.h"

/// Analysis of the patterns of pruned models: which of them is structure and which is chance. What is found
/// is a SQLite database, sparsity.sqlite in a folder; docs/sparsity_patterns.md describes its tables.

namespace tessera::sparsity {

/// The database's application_id: "tsp1".
inline constexpr int32_t kPatternsId = 0x74737031;
/// Its user_version: 2 has input_norms.
inline constexpr int64_t kPatternsVersion = 2;
inline constexpr const char* kPatternsFile = "sparsity.sqlite";
inline constexpr const char* kPatternsWhat = "sparsity.sqlite of tessera sparsity analyze";

/// Norms of a dense model's inputs, for inputs of analyze that come without.
struct DenseNorms {
  std::string fingerprint;  // of the model
  std::string from;         // what they are of, for the table `settings`
  InputNorms norms;         // dense_input_norms
};

struct AnalyzeOptions {
  PatternOptions patterns;
  /// Measures them; called once, when the inputs are found to be good. Empty: inputs without norms stay so.
  std::function<DenseNorms()> dense_norms = {};
  std::vector<std::string> only;  // matrices whose name contains one of these; empty: all
  std::optional<Axis> axis;       // of the features; nothing: axis_of each module

  Axis axis_for(const std::string& matrix) const { return axis ? *axis : axis_of(matrix); }
};

/// Analyzes pruned models (Hugging Face model directories whose weights hold zeros) and files of masks, and
/// writes `folder`/sparsity.sqlite, as one file that appears when it is complete; the same inputs and options
/// give the same bytes. Matrices of one name in several inputs are compared pair by pair. `tell` gets a line
/// per matrix, and one per input that has no norms of its matrices' inputs. Throws for fewer than one input,
/// inputs of different models, or of another than that of the dense norms, an input given twice, a matrix
/// that has values which are not finite, and, before the work, if the folder cannot be written to or its
/// sparsity.sqlite is not one of analyze (a sweep's).
void analyze(const std::vector<std::string>& inputs, const std::string& folder, const AnalyzeOptions& options,
             const std::function<void(const std::string&)>& tell);

/// Overlap of two inputs, matrix by matrix, without chance levels: what `tessera sparsity compare` prints.
struct MatrixComparison {
  std::string matrix;
  Axis axis = Axis::column;
  double sparsity_a = 0, sparsity_b = 0;
  Summary jaccard, cosine, hamming;
};
std::vector<MatrixComparison> compare(const std::string& a, const std::string& b,
                                      const AnalyzeOptions& options);

}  // namespace tessera::sparsity
