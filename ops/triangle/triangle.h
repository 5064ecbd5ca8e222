#pragma once

#include "tensor/tensor.h"

namespace tessera::ops {

/// The lower (tril) or upper (triu) triangle of the last two dimensions, any dtype and layout; other elements
/// become 0, NaN among them. Element (r, c) of a matrix stays if c - r <= diagonal (tril) or c - r >=
/// diagonal (triu): diagonal 0 keeps the main one, 1 is the one above it, -1 the one below. The causal mask
/// of T queries is tril(Tensor::ones({T, T}, DType::boolean)). dx is the same triangle of dy. Nothing is
/// saved. Throws for tensors of fewer than two dimensions.
Tensor tril(const Tensor& x, int64_t diagonal = 0, Site site = Site::here());
Tensor triu(const Tensor& x, int64_t diagonal = 0, Site site = Site::here());

}  // namespace tessera::ops
