#pragma once

#include <optional>

#include "bench/record.h"
#include "pretrained/sparse_model.h"

namespace tessera::bench {

/// How a model of random weights is made sparse for a benchmark of generation.
struct DecodeSparse {
  std::optional<ops::SparseFormat> format = {};  // none: dense weights
  double weight_sparsity = 0;      // share of each matrix's weights, the smallest, that become 0
  double activation_sparsity = 0;  // share of inputs that gates leave out
  bool is_sparse() const { return format || activation_sparsity > 0; }
};

/// Prunes, compresses and gates the linear layers in the model's blocks. All blocks have the compressed
/// weights of the first, each in memory of its own: the host would take minutes for the 6.5 billion of a 7B
/// model, and the time of a step depends on how many zeros there are and where, and on memory that no layer
/// before has read. A gate's threshold is the quantile of |x| over the inputs of its layer on 64 random
/// tokens. Throws as pretrained::make_sparse does with `required`.
std::vector<pretrained::SparseModule> make_sparse(models::Llama& model, const DecodeSparse& sparse,
                                                  int64_t tokens);

/// The matmuls of a step of generation: the linear layers in the blocks, which `modules` describes (empty:
/// they are dense), with what their gates leave out on the texts, and the LM head.
std::vector<Matmul> matmuls_of(models::LanguageRef model,
                               const std::vector<pretrained::SparseModule>& modules,
                               const std::vector<std::vector<int64_t>>& texts);
/// Bytes that a step reads of compressed weights, without those of inputs that gates leave out. Dense weights
/// are parameters of the model, and not part of it.
double compressed_bytes(const std::vector<Matmul>& matmuls);

}  // namespace tessera::bench
