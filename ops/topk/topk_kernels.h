#pragma once

#include "ops/topk/topk.h"

namespace tessera::ops {

/// indices [L, k], packed, of the k largest of each row of x [L, R]: rows of elements side by side, one
/// stride apart (Tensor::has_rows). L, k >= 1.
void topk_cpu(const Tensor& indices, const Tensor& x);
void topk_cuda(const Tensor& indices, const Tensor& x);
/// Of i64 and i32.
void topk_integers_cuda(const Tensor& indices, const Tensor& x);

}  // namespace tessera::ops
