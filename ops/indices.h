#pragma once

#include "tensor/tensor.h"

namespace tessera::ops {

/// The elements of a packed i64 or i32 tensor as 64-bit numbers, for kernels on either side: one kernel
/// serves both widths.
struct Indices {
  explicit Indices(const Tensor& packed) : data(packed.raw()), wide(packed.dtype() == DType::i64) {}
  TESSERA_HD int64_t operator[](int64_t i) const {
    return wide ? static_cast<const int64_t*>(data)[i] : static_cast<const int32_t*>(data)[i];
  }

  const void* data;
  bool wide;
};

}  // namespace tessera::ops
