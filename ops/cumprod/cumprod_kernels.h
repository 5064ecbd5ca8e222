#pragma once

#include "ops/cumprod/cumprod.h"
#include "ops/cumsum/cumsum_kernels.h"

namespace tessera::ops {

/// y, floating as x or i64, = the running products of x, which has elements.
void cumprod_cpu(const Tensor& y, const Tensor& x, int dim);
void cumprod_cuda(const Tensor& y, const Tensor& x, int dim);

/// dx from dy, x and y; all floating and packed.
void cumprod_backward_cpu(const Tensor& dx, const Tensor& dy, const Tensor& x, const Tensor& y, int dim);
void cumprod_backward_cuda(const Tensor& dx, const Tensor& dy, const Tensor& x, const Tensor& y, int dim);

}  // namespace tessera::ops
