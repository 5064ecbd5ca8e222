#pragma once

#include <vector>

#include "tensor/tensor.h"

/// Matrices in f64, for definitions element by element.

namespace tessera::sparsity::test {

using Matrix = std::vector<std::vector<double>>;

inline Matrix matrix_of(const Tensor& x) {
  const std::vector<double> values = x.clone().to_vector<double>();
  const size_t columns = size_t(x.size(1));
  Matrix m(size_t(x.size(0)), std::vector<double>(columns));
  for (size_t i = 0; i < values.size(); ++i) m[i / columns][i % columns] = values[i];
  return m;
}

}  // namespace tessera::sparsity::test
