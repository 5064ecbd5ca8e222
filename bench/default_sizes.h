#pragma once

#include <string>
#include <vector>

#include "ops/op.h"

/// The sizes that benchmarks take where none are given. On a GPU they are those of training and generation,
/// which the peers measure too. On a CPU they are such that one call takes some 10 to 100 ms on two cores.

namespace tessera::bench {

/// On a GPU OpSpec::benches. On a CPU OpSpec::cpu_benches or, where there are none, OpSpec::benches whose
/// sizes are halved, the largest ones first, until a call fits (`smaller`); problems that become the same are
/// left out.
std::vector<ops::Case> default_cases(const ops::OpSpec& op, Device device);

/// Texts of a batch, and tokens per text.
struct BatchSize {
  int64_t texts, tokens;
};
BatchSize default_language_batch(Device device);             // `bench step gpt`, `bench step llama`
std::vector<BatchSize> default_bert_batches(Device device);  // `bench step bert`
int64_t default_layers_batch(Device device);                 // texts, `bench layers`

struct FfnShape {
  int64_t tokens, width, hidden;
};
std::vector<FfnShape> default_ffn_shapes(Device device);

/// Of `bench decode`.
struct DecodeSizes {
  std::string shape;  // of decode_shapes()
  int64_t new_tokens;
  int repeats, warmups;
};
DecodeSizes default_decode_sizes(Device device);

int64_t default_optim_parameters(Device device);
int64_t default_copy_mib(Device device);

}  // namespace tessera::bench
