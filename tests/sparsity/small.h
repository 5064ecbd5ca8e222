#pragma once

#include "sparsity/prune.h"
#include "tests/models/small_models.h"

namespace tessera::sparsity::test {

/// A text of tokens of the small models.
inline std::vector<int64_t> small_text(int64_t tokens) {
  std::vector<int64_t> text;
  for (int64_t i = 0; i < tokens; ++i) text.push_back((i * i + i / 7) % 19);
  return text;
}

inline Samples small_samples(int64_t count = 6, uint64_t seed = 3) {
  return choose_samples(small_text(200), {.count = count, .length = 12, .seed = seed});
}

/// The same weights at every call.
struct SmallGpt {
  explicit SmallGpt(models::GptFamily family = models::GptFamily::gpt2, DType dtype = DType::f32)
      : rng(3), model(config(family, dtype), rng, kCpu) {}
  static models::GptConfig config(models::GptFamily family, DType dtype) {
    models::GptConfig config = models::small_gpt(family);
    if (family == models::GptFamily::opt) config.activation = ops::Activation::relu;
    config.dtype = dtype;
    return config;
  }
  Rng rng;
  models::Gpt model;
};

struct SmallLlama {
  SmallLlama() : rng(4), model(config(), rng, kCpu) {}
  static models::LlamaConfig config() {
    models::LlamaConfig config = models::small_llama();
    config.dtype = DType::f32;
    return config;
  }
  Rng rng;
  models::Llama model;
};

}  // namespace tessera::sparsity::test
