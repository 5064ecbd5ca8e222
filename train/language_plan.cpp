#include "train/language_plan.h"

#include <algorithm>

namespace tessera::train {
namespace {

/// What counts of a model of either kind.
struct Sizes {
  int64_t vocabulary, d, layers;
  int64_t q, kv;          // widths of queries, and of keys
  int64_t ff, up;         // hidden width, and rows of what makes it (twice as many if gated)
  int64_t biases, norms;  // numbers in a block's biases and norms
  int64_t tables, rest;   // numbers in token and position tables, and in the last norm and head
  bool gated, rope;
  DType dtype;
};

Sizes sizes_of(const models::GptConfig& c) {
  const int64_t d = c.d_model;
  return {.vocabulary = c.vocabulary,
          .d = d,
          .layers = c.layers,
          .q = d,
          .kv = d,
          .ff = c.d_ff,
          .up = c.d_ff,
          .biases = 3 * d + d + c.d_ff + d,
          .norms = 4 * d,
          .tables = (c.vocabulary + c.positions + c.position_offset()) * d,
          .rest = 2 * d + (c.tied ? 0 : c.vocabulary * d),
          .gated = false,
          .rope = false,
          .dtype = c.dtype};
}

Sizes sizes_of(const models::LlamaConfig& c) {
  const int64_t d = c.d_model, q = c.heads * c.head_size(), kv = c.kv_heads * c.head_size();
  const int64_t up = c.gated ? 2 * c.d_ff : c.d_ff;
  return {.vocabulary = c.vocabulary,
          .d = d,
          .layers = c.layers,
          .q = q,
          .kv = kv,
          .ff = c.d_ff,
          .up = up,
          .biases = (c.attention_bias ? q + 2 * kv + d : 0) + (c.mlp_bias ? up + d : 0),
          .norms = 2 * d,
          .tables = c.vocabulary * d,
          .rest = d + (c.tied ? 0 : c.vocabulary * d),
          .gated = c.gated,
          .rope = true,
          .dtype = c.dtype};
}

Sizes sizes_of(const LanguageConfig& config) {
  return std::visit([](const auto& c) { return sizes_of(c); }, config);
}

int64_t matrices(const Sizes& s) {  // of a block
  return s.d * (s.q + 2 * s.kv) + s.q * s.d + s.d * s.up + s.ff * s.d;
}

}  // namespace

int64_t count_parameters(const LanguageConfig& config) {
  const Sizes s = sizes_of(config);
  return s.tables + s.rest + s.layers * (matrices(s) + s.biases + s.norms);
}

LanguageFlops count_flops(const LanguageConfig& config, int64_t batch, int64_t length) {
  const Sizes s = sizes_of(config);
  const double tokens = double(batch) * double(length);
  return {.products = 2 * tokens * double(s.layers) * double(matrices(s)),
          .attention = 2 * tokens * double(length) * double(s.q) * double(s.layers),
          .head = 2 * tokens * double(s.vocabulary) * double(s.d)};
}

LanguageMemory plan_memory(const LanguageConfig& config, int64_t batch, int64_t length) {
  const Sizes s = sizes_of(config);
  const double tokens = double(batch) * double(length), element = double(size_of(s.dtype));
  const double parameters = double(count_parameters(config));
  // A token's numbers that a block keeps: input and output of either norm's sum, the fused projection, heads
  // (turned ones too), what attention returns, the hidden rows before and behind the activation, and the
  // branch that the next norm adds.
  const double block = double(4 * s.d + (s.q + 2 * s.kv) * (s.rope ? 2 : 1) + s.q + s.d + s.up + s.ff);
  const double logits = tokens * double(s.vocabulary) * element;
  return {.parameters = parameters * element,
          .gradients = parameters * 4,
          .optimizer = parameters * (size_of(s.dtype) == 2 ? 12 : 8),
          .saved = tokens * (double(s.layers) * block + 2 * double(s.d)) * element + logits,
          .transient = logits};
}

}  // namespace tessera::train
