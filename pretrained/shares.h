#pragma once

#include <optional>
#include <string>
#include <vector>

#include "pretrained/load.h"

/// Which elements of a model's parameters one of several ranks holds (nn/tensor_parallel.h).

namespace tessera::pretrained {

struct IndexRange {
  int64_t begin = 0, end = 0;
  int64_t count() const { return end - begin; }
  bool operator==(const IndexRange&) const = default;
};

/// One rank's share of a parameter: ranges of rows, and of these rows all columns or one range of columns. No
/// rows: the share is zeros.
struct ParameterShare {
  std::vector<IndexRange> rows;
  std::optional<IndexRange> columns = {};
};

/// The share of the parameter `name` ("blocks.3.attention.qkv.weight", by our names) of the model, on rank
/// `rank` of `ranks`:
///   token, lm_head           rows of the vocabulary
///   attention.qkv, mlp.up    rows: of its heads, of the gate and of the other half
///   attention.out, mlp.down  columns: those multiplied with its heads and hidden features; bias on rank 0
///   norms                    all
ParameterShare share_of(const std::string& name, const models::LlamaConfig& config, int rank, int ranks);

/// Copies this rank's share from the file into the parameters. As copy_weights, of a model with several
/// ranks.
void copy_shares(const models::Llama& model, const NameTable& table, const Matched& matched,
                 const io::WeightSource& source);

/// The same from a whole model of the same configuration, on the same device.
void copy_shares(const models::Llama& model, const models::Llama& whole);

}  // namespace tessera::pretrained
