#pragma once

#include "tensor/tensor.h"

namespace tessera::ops {

/// w[support[i]] += values[i] for a matrix w with dense rows, of values' dtype; the sum is rounded once.
/// Places are different. Throws for one outside w.
void add_at_cpu(const Tensor& w, const Tensor& values, const Tensor& support);
/// The same; a place outside w is left out.
void add_at_cuda(const Tensor& w, const Tensor& values, const Tensor& support);

/// to[i] = panel[support[i]] for the places that lie in rows first ... first + panel's rows - 1 of the whole
/// matrix, of which the panel is those; the others stay. Both f32, or f64.
void take_at_cpu(const Tensor& to, const Tensor& panel, const Tensor& support, int64_t first);
void take_at_cuda(const Tensor& to, const Tensor& panel, const Tensor& support, int64_t first);

}  // namespace tessera::ops
