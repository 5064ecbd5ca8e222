#pragma once

#include <span>

#include "pretrained/language_model.h"
#include "sparsity/split_sweep.h"
#include "train/perplexity.h"

/// The model that splits of a sparsity are made of, and how it is measured.

namespace tessera::sparsity {

models::LanguageModel load_dense(const SweepOptions& options);

/// `batch`: windows at a time.
inline double perplexity_of(const models::LanguageModel& model,
                            std::span<const train::PerplexityWindow> windows, int64_t batch = 1) {
  return train::measure_perplexity(model, windows, model.device(), batch).perplexity();
}

/// Medians and 90th percentiles of the times.
void take(SplitResult& result, const DecodeTimes& times);

}  // namespace tessera::sparsity
