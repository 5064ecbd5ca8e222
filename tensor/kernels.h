#pragma once

#include "tensor/tensor.h"

namespace tessera {

/// Kernels behind Tensor's in-place writers; shapes and devices have been checked.

void fill_cpu(const Tensor& y, double value);
void fill_cuda(const Tensor& y, double value);

/// y = convert(x), x broadcasting to y; both on the same device.
void copy_cpu(const Tensor& y, const Tensor& x);
void copy_cuda(const Tensor& y, const Tensor& x);

/// y += x: same shape and device, floating dtypes which may differ (on a GPU f64 goes with f64 alone); the
/// sum is rounded once, to y's dtype.
void accumulate(const Tensor& y, const Tensor& x);
void accumulate_cpu(const Tensor& y, const Tensor& x);
void accumulate_cuda(const Tensor& y, const Tensor& x);

}  // namespace tessera
