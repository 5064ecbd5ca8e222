#pragma once

#include "train/language_job.h"

/// What a training step of a language model takes, before it is run.

namespace tessera::train {

int64_t count_parameters(const LanguageConfig& config);

/// Floating-point operations of one forward pass over `batch` sequences of `length` tokens (a multiply-add is
/// two): the products with weights, the head's apart, and causal attention, of which only the half that is
/// seen counts.
struct LanguageFlops {
  double products = 0, attention = 0, head = 0;
  double forward() const { return products + attention + head; }
  /// Backward does each product twice, and of attention two and a half times what forward did: it computes
  /// the scores once more.
  double step() const { return 3 * (products + head) + 3.5 * attention; }
};
LanguageFlops count_flops(const LanguageConfig& config, int64_t batch, int64_t length);

/// Bytes of a training step, by kind. AdamW with f32 gradients, moments and, for 16-bit parameters, masters.
struct LanguageMemory {
  double parameters = 0, gradients = 0, optimizer = 0;
  double saved = 0;      // activations kept for backward
  double transient = 0;  // the largest set of temporaries at one time
  double total() const { return parameters + gradients + optimizer + saved + transient; }
};
LanguageMemory plan_memory(const LanguageConfig& config, int64_t batch, int64_t length);

}  // namespace tessera::train
