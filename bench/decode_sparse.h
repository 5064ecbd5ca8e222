#pragma once

#include <optional>

#include "pretrained/sparse_model.h"

namespace tessera::bench {

/// How a model of random weights is made sparse for a benchmark of generation.
struct DecodeSparse {
  std::optional<ops::SparseFormat> format = {};  // none: dense weights
  double weight_sparsity = 0;      // share of each matrix's weights, the smallest, that become 0
  double activation_sparsity = 0;  // share of inputs that gates leave out
  bool is_sparse() const { return format || activation_sparsity > 0; }
};

/// Prunes, compresses and gates the linear layers in the model's blocks. A gate's threshold is the quantile
/// of |x| over the inputs of its layer on 64 random tokens. Throws as pretrained::make_sparse does with
/// `required`.
void make_sparse(models::Llama& model, const DecodeSparse& sparse, int64_t tokens);

/// Bytes of the compressed weights that a step reads, without those of columns that gates leave out.
double sparse_bytes(models::Llama& model, double activation_sparsity);
double sparse_bytes(models::Gpt& model, double activation_sparsity);

}  // namespace tessera::bench
