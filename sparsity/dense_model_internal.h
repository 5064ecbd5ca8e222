#pragma once

#include <type_traits>
#include <variant>

#include "pretrained/load.h"
#include "sparsity/split_sweep.h"
#include "train/perplexity.h"

/// The model that splits of a sparsity are made of, and how it is measured.

namespace tessera::sparsity {

/// Whether it is a models::Llama, and not a models::Gpt.
inline bool starts_from_llama(const SweepOptions& options) {
  return std::holds_alternative<models::LlamaConfig>(pretrained::read_config(options.model).model);
}

template <class Model>
Model load_dense(const SweepOptions& options, Rng& rng) {
  const pretrained::LoadOptions load{.dtype = options.dtype};
  if constexpr (std::is_same_v<Model, models::Llama>)
    return pretrained::load_llama(options.model, rng, options.device, load);
  else
    return pretrained::load_gpt(options.model, rng, options.device, load);
}

/// Medians and 90th percentiles of the times.
void take(SplitResult& result, const DecodeTimes& times);

}  // namespace tessera::sparsity
