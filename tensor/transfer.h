#pragma once

#include "tensor/tensor.h"

namespace tessera {

/// y = convert(x), x broadcasting to y, from one device to another. Conversion and layout changes happen on
/// the GPU or the CPU side, the bus sees packed or pitched rows. To the host it waits; from pageable host
/// memory the driver stages. Throws while a graph is being captured, unless it is an upload from page-locked
/// memory that is kept alive.
void transfer(const Tensor& y, const Tensor& x);

/// Page-locked host memory (cudaMallocHost); ordinary host memory where there is no GPU.
Allocator& pinned_allocator();

}  // namespace tessera
