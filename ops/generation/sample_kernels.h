#pragma once

#include "ops/generation/sample.h"

namespace tessera::ops {

/// Logits have rows, and there is at least one token.
void sample_cpu(const Choices& choices, const Tensor& logits, const Sampling& sampling);
void sample_cuda(const Choices& choices, const Tensor& logits, const Sampling& sampling);
/// lengths is packed, positions i32 [B, n] packed.
void advance_cuda(const Tensor& lengths, const Tensor& positions);

}  // namespace tessera::ops
