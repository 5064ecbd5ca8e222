#pragma once

#include "tensor/tensor.h"

namespace tessera {

/// Whether both tensors have the same dtype, shape and bits, wherever they lie. Waits for the devices.
bool equal_bits(const Tensor& a, const Tensor& b);

}  // namespace tessera
