#pragma once

#include "eval/perplexity.h"
#include "sparsity/prune.h"
#include "tessera.h"

/// Names that the code in documents and header comments assumes: it is compiled, not run, inside a function
/// that sees them (tools/check_snippets).

namespace tessera::snippets {

extern const Device device;
extern Rng rng;
extern nn::Mlp model;
extern optim::AdamW optimizer;
extern const int64_t steps, micro_batches;
extern const Tensor inputs, batch;
extern const std::vector<int64_t> tokens, prompt;
Tensor loss_of(const Tensor& x);

}  // namespace tessera::snippets
