#pragma once

#include <cstdint>
#include <vector>

#include "plan/plan.h"
#include "plan/ranks.h"

/// What plans of GPT, LLaMA and BERT share: the sizes of their blocks, and what follows from these alone.

namespace tessera::plan {

/// The sizes that count.
struct Sizes {
  int64_t vocabulary, d, layers;
  int64_t q, kv;  // widths of queries, and of keys
  int64_t head_dim;
  int64_t ff, up;         // hidden width, and rows of what makes it (twice as many if gated)
  int64_t biases, norms;  // numbers in a block's biases and norms
  int64_t tables, rest;   // numbers in embedding tables, and in the norm and the head outside the blocks
  bool gated, rope;
  DType dtype;
  bool fused;  // q, k and v are one module, and so are gate and up
};

nn::FactorCounts matrices(const Sizes& sizes, const Forms& forms);  // of a block
int64_t count_parameters(const Sizes& sizes, const Forms& forms);
std::vector<HiddenMatrix> hidden_matrices(const Sizes& sizes, const Forms& forms);
/// The tables, and the matrices of the blocks.
ArenaSizes arena_sizes(const Sizes& sizes, const Forms& forms);

}  // namespace tessera::plan
