#pragma once

#include "ops/dropout/dropout.h"

namespace tessera::ops {

/// What is drawn: the element at row-major place i lives if keeps(word i % 4 of block i / 4), times `scale`.
struct DropoutMask {
  RandomStream stream;
  uint32_t threshold = 0;
  double scale = 1;
  TESSERA_HD bool keeps(uint32_t word) const { return word >= threshold; }
};

/// y = x under the mask; forward and backward.
void dropout_cpu(const Tensor& y, const Tensor& x, const DropoutMask& mask);
void dropout_cuda(const Tensor& y, const Tensor& x, const DropoutMask& mask);

}  // namespace tessera::ops
