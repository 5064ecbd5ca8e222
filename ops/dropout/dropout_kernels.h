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

/// A mask on the host, along places that mostly follow one another: a block is drawn once for its four.
class DropoutWalk {
 public:
  explicit DropoutWalk(const DropoutMask& mask) : mask_(mask), offset_(mask.stream.offset()) {}
  bool keeps(int64_t place) {
    if (place / 4 != block_) random_ = philox(mask_.stream.seed, offset_, uint64_t(block_ = place / 4));
    return mask_.keeps(random_.word[place % 4]);
  }

 private:
  DropoutMask mask_;
  uint64_t offset_;
  int64_t block_ = -1;
  Uint4 random_{};
};

/// y = x under the mask; forward and backward.
void dropout_cpu(const Tensor& y, const Tensor& x, const DropoutMask& mask);
void dropout_cuda(const Tensor& y, const Tensor& x, const DropoutMask& mask);
/// The same into a tensor of its own.
Tensor masked(const Tensor& x, const DropoutMask& mask);

}  // namespace tessera::ops
