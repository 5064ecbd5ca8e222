#pragma once

#include <string>
#include <vector>

#include "io/weights.h"
#include "tensor/tensor.h"

namespace tessera::sparsity {

/// The linear layers in the blocks of a Hugging Face model directory of gpt2, opt or the LLaMA family, read
/// one matrix at a time: no model is made.
class ModelMatrices {
 public:
  struct Matrix {
    std::string name;               // in transformers: "model.layers.3.mlp.down_proj"
    int64_t block = 0;              // 3
    std::string part;               // "mlp.down_proj"
    int64_t rows = 0, columns = 0;  // outputs and inputs
    std::string stored;             // its name in the files
    bool transposed = false;        // there as [columns, rows]
  };

  /// Throws, naming the folder, for another model, and for names or shapes that are not those of its
  /// config.json. Reads no element.
  explicit ModelMatrices(const std::string& folder);

  const std::string& folder() const { return folder_; }
  /// In the order of the model's layers.
  const std::vector<Matrix>& all() const { return matrices_; }
  /// The matrix of that name, or null.
  const Matrix* find(const std::string& name) const;
  /// [rows, columns], of the file's dtype and any layout, in host memory.
  Tensor load(const Matrix& matrix) const;
  /// What fingerprint_of gives for the model (pretrained/fingerprint.h). Reads all of them.
  std::string fingerprint() const;

 private:
  std::string folder_;
  io::WeightSource source_;
  std::vector<Matrix> matrices_;
};

}  // namespace tessera::sparsity
