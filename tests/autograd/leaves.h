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

}  // namespace tessera
