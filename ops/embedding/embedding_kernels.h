#pragma once

#include "ops/embedding/embedding.h"

namespace tessera::ops {

/// All but indices, which is packed, have rows; dtable is [V, C] in sum_dtype, on CUDA also in dy's dtype
/// (sums in f32, rounded once), and is written throughout, or added to if `adds`.
void embedding_forward_cpu(const Tensor& y, const Tensor& table, const Tensor& indices);
void embedding_forward_cuda(const Tensor& y, const Tensor& table, const Tensor& indices);
void embedding_backward_cpu(const Tensor& dtable, const Tensor& dy, const Tensor& indices, bool adds);
void embedding_backward_cuda(const Tensor& dtable, const Tensor& dy, const Tensor& indices, bool adds);

}  // namespace tessera::ops
