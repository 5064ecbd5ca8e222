#pragma once

#include <type_traits>
#include <variant>

#include "pretrained/load.h"
#include "sparsity/split_sweep.h"

/// The model that splits of a sparsity are made of.

namespace tessera::sparsity {

/// Whether it is a models::Llama, and not a models::Gpt.
inline bool starts_from_llama(const SweepOptions& options) {
  return std::holds_alternative<models::LlamaConfig>(pretrained::read_config(options.model).model);
}

/// `rng` must outlive it.
template <class Model>
Model load_dense(const SweepOptions& options, Rng& rng) {
  const pretrained::LoadOptions load{.dtype = options.dtype};
  if constexpr (std::is_same_v<Model, models::Llama>)
    return pretrained::load_llama(options.model, rng, options.device, load);
  else
    return pretrained::load_gpt(options.model, rng, options.device, load);
}

}  // namespace tessera::sparsity
