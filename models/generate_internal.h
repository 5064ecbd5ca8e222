#pragma once

#include <algorithm>

#include "models/generate.h"

/// The body of generate(). Included by models/generate.h.

namespace tessera::models {

template <class Model>
std::vector<int64_t> generate(const Model& model, std::span<const int64_t> prompt,
                              const GenerateOptions& options) {
  options.sampling.validate();
  check(!prompt.empty(), "generate: the prompt has no tokens; begin with the model's first token");
  check(options.most_tokens >= 0, "generate: most_tokens is ", options.most_tokens);
  const int64_t given = int64_t(prompt.size());
  check(given <= model.longest(), "generate: the prompt has ", given, " tokens; the model has ",
        model.longest(), " positions");
  // The last token chosen is never run.
  const int64_t room = std::min(options.most_tokens, model.longest() - given + 1);
  std::vector<int64_t> text;
  if (room == 0) return text;
  nn::KvCache cache = model.make_cache(1, given + room - 1);
  const Device device = model.token.weight.device();
  Tensor logits = model.decode(Tensor::from(prompt, {1, given}, device), cache);
  while (true) {
    const std::vector<float> row = logits.to(DType::f32).template to_vector<float>();
    text.push_back(sample(row, options.sampling, choice_number(options.seed, text.size())));
    const bool stops = std::find(options.stop_tokens.begin(), options.stop_tokens.end(), text.back()) !=
                       options.stop_tokens.end();
    if (options.on_token && !options.on_token(text.back())) break;
    if (stops || int64_t(text.size()) == room) break;
    logits = model.decode(Tensor::from(std::vector<int64_t>{text.back()}, {1, 1}, device), cache);
  }
  return text;
}

}  // namespace tessera::models
