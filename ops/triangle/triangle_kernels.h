#pragma once

#include "ops/triangle/triangle.h"
#include "runtime/config.h"

namespace tessera::ops {

/// Which elements of a matrix stay.
struct Triangle {
  bool lower;
  int64_t diagonal;
  TESSERA_HD bool keeps(int64_t row, int64_t column) const {
    return lower ? column - row <= diagonal : column - row >= diagonal;
  }
};

/// y = the triangle of x, of the same shape; y is not empty.
void triangle_cpu(const Tensor& y, const Tensor& x, const Triangle& triangle);
void triangle_cuda(const Tensor& y, const Tensor& x, const Triangle& triangle);

}  // namespace tessera::ops
