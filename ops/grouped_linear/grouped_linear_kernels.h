#pragma once

#include "tensor/tensor.h"

/// The parts of a grouped linear layer that grouped_linear and grouped_mlp share.

namespace tessera::ops {

/// x or y as one matrix a group, off the tape: [..., K, C] -> [K, rows, C]; shared: [..., C] -> [rows, C].
Tensor by_group(const Tensor& x, bool shared);

/// dy weight for dy [K, rows, out] and weight [K, out, in], of the input's shape and summed over the groups
/// if they share it. In the weight's dtype, or its sum dtype if the sum is not one GEMM.
Tensor grouped_input_gradient(const Shape& shape, const Tensor& dy, const Tensor& weight, bool shared);

}  // namespace tessera::ops
