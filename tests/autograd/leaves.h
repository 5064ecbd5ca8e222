#pragma once

#include <vector>

#include "autograd/tape.h"
#include "tests/tensors.h"

/// Leaves in f64 on the CPU, which the tests of tapes share.

namespace tessera {

inline Tensor leaf(std::vector<double> values) {
  Tensor x = Tensor::from(values, {int64_t(values.size())});
  require_grad(x);
  return x;
}

/// A leaf of equal elements.
inline Tensor full_leaf(const Shape& shape, double value) {
  Tensor x = Tensor::full(shape, value, DType::f64, Device::cpu());
  require_grad(x);
  return x;
}

}  // namespace tessera
