#pragma once

#include <functional>
#include <span>
#include <vector>

#include "nn/attention.h"

namespace tessera::models {

/// How the next token is chosen from the logits of all: they are divided by `temperature`, then only the
/// top_k largest are kept (0: all), then the fewest of these, largest first, whose probabilities add up to
/// top_p or more (Holtzman et al., arXiv:1904.09751, section 3.1), then one is drawn by its probability.
/// Equal logits rank by their index. temperature 0 takes the largest logit: greedy.
struct Sampling {
  double temperature = 1;
  int64_t top_k = 0;
  double top_p = 1;

  /// Throws, naming the option, unless 0 <= temperature, 0 <= top_k and 0 < top_p <= 1.
  void validate() const;
};

/// One choice; `random` is a number of [0, 1). Throws if no logit is a number above -inf, or one is NaN.
int64_t sample(std::span<const float> logits, const Sampling& sampling, double random);

struct GenerateOptions {
  int64_t most_tokens = 128;  // new ones
  Sampling sampling = {};
  uint64_t seed = 0;                      // choice i takes the i-th number of this seed: runs repeat
  std::vector<int64_t> stop_tokens = {};  // end the text, and are part of it
  /// Called with each new token; false ends the text.
  std::function<bool(int64_t token)> on_token = {};
};

/// The number of [0, 1) of choice `index`.
double choice_number(uint64_t seed, uint64_t index);

/// New tokens after `prompt`. Model: Gpt, Llama, or what has their make_cache and decode. The prompt is run
/// once, then each new token by itself over the cache. Throws for an empty prompt; the text ends early where
/// the model has no more positions.
template <class Model>
std::vector<int64_t> generate(const Model& model, std::span<const int64_t> prompt,
                              const GenerateOptions& options);

}  // namespace tessera::models

#include "models/generate_internal.h"
