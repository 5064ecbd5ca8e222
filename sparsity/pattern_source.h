#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "sparsity/input_norms.h"
#include "sparsity/masks.h"
#include "sparsity/model_matrices.h"

namespace tessera::sparsity {

/// A pruned model or a file of masks, as the analysis reads it.
class PatternSource {
 public:
  explicit PatternSource(const std::string& path);
  PatternSource(PatternSource&&) noexcept;
  ~PatternSource();

  /// Its name: the last part of the path, or the whole of it where that is ambiguous.
  const std::string& name() const { return name_; }
  void use_whole_path() { name_ = path_; }
  const Masks& masks() const { return masks_; }
  /// The weight [rows, columns] in f64, or an undefined tensor if the input has masks alone. Throws for
  /// values that are not finite.
  Tensor weight(const std::string& matrix) const;
  /// Norms of the inputs of a matrix as tessera prune noted them in the folder, one per column; empty if it
  /// did not: its method read no samples, or the input has masks alone; or those that it was given.
  std::vector<double> input_norms(const std::string& matrix) const;
  bool has_input_norms() const { return !norms_.empty(); }
  /// In place of norms that it does not have: of all its matrices. Throws, naming the matrix, if one is
  /// missing or has another number of columns.
  void take_input_norms(const InputNorms& norms);
  /// Perplexities that tessera prune has noted in the folder: what they are of, and the number.
  std::map<std::string, double> perplexities() const;

 private:
  std::string path_, name_;
  Masks masks_;
  InputNorms norms_;
  std::unique_ptr<ModelMatrices> weights_;  // null: masks alone
};

}  // namespace tessera::sparsity
