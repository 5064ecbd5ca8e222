#pragma once

#include "ops/dropout/dropout.h"

namespace tessera::ops {

/// What is drawn: the factor of the element at row-major place i, `scale` if keeps(word i % 4 of block i /
/// 4), else 0. (A factor, not a choice between the element and 0: 0 times NaN is NaN.)
struct DropoutMask {
  RandomStream stream;
  uint32_t threshold = 0;
  double scale = 1;

  /// Of chance 0 < p < 1.
  static DropoutMask of(double p, const RandomStream& stream) {
    return {stream, uint32_t(p * 4294967296.0), 1 / (1 - p)};
  }
  TESSERA_HD bool keeps(uint32_t word) const { return word >= threshold; }
};

/// The factors of n elements from row-major place `place` on, on the host. C: float or double.
template <class C>
void dropout_factors(C* factors, const DropoutMask& mask, int64_t place, int64_t n);

/// y = x under the mask; forward and backward.
void dropout_cpu(const Tensor& y, const Tensor& x, const DropoutMask& mask);
void dropout_cuda(const Tensor& y, const Tensor& x, const DropoutMask& mask);
/// The same into a tensor of its own.
Tensor masked(const Tensor& x, const DropoutMask& mask);

}  // namespace tessera::ops
