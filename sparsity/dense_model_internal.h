#pragma once

#include "pretrained/language_model.h"
#include "sparsity/split_sweep.h"

/// The model that splits of a sparsity are made of.

namespace tessera::sparsity {

models::LanguageModel load_dense(const SweepOptions& options);

/// Medians and 90th percentiles of the times.
void take(SplitResult& result, const DecodeTimes& times);

}  // namespace tessera::sparsity
