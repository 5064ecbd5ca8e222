#pragma once

#include <span>
#include <string>
#include <utility>
#include <vector>

#include "models/language_model.h"
#include "ops/sparse_linear/sparse_weight.h"

/// What a sparse model costs: bytes and times.

namespace tessera::sparsity {

/// Puts every linear layer in the model's blocks into the format, without gates, whatever it is in by now.
void compress_layers(models::LanguageRef model, ops::SparseFormat format);

/// Bytes of the linear layers in the blocks, as they are and dense, and the share of their elements that are
/// not stored.
struct LayerBytes {
  uint64_t bytes = 0, dense_bytes = 0;
  double weight_sparsity = 0;
};
LayerBytes bytes_of_layers(models::LanguageRef model);

struct TimingOptions {
  int64_t new_tokens = 32;  // 2 or more
  int repeats = 5, warmups = 1;
};
/// Of each repeat, by a clock on the host: milliseconds to the first new token, and per token after it.
struct DecodeTimes {
  std::vector<double> ttft_ms, tpot_ms;
};
/// Greedy generation after the prompt.
DecodeTimes time_generation(const models::LanguageModel& model, std::span<const int64_t> prompt,
                            const TimingOptions& options);

/// Milliseconds of a step of generation per linear layer, by our names: from the end of the layer before (of
/// the step's begin) to its own, the device synchronised at each, which is how the sum exceeds a step's time.
std::vector<std::pair<std::string, double>> time_layers(models::LanguageRef model,
                                                        std::span<const int64_t> prompt, int64_t steps);

}  // namespace tessera::sparsity
