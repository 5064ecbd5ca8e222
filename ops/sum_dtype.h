#pragma once

#include "tensor/dtype.h"

namespace tessera::ops {

/// The dtype of what is summed over many elements (sums of products, losses, statistics of rows, gradients of
/// weights): f64 for f64, else f32.
inline DType sum_dtype(DType dtype) {
  return dtype == DType::f64 ? DType::f64 : DType::f32;
}

}  // namespace tessera::ops
