#pragma once

#include "ops/random/random.h"
#include "tests/tensors.h"

namespace tessera::nn {

/// Normal numbers in f64.
inline Tensor random(const Shape& shape, uint64_t seed) {
  Rng rng(seed);
  const Tensor tensor = Tensor::empty(shape, DType::f64, kCpu);
  ops::fill_normal(tensor, 0, 1, rng);
  return tensor;
}

}  // namespace tessera::nn
