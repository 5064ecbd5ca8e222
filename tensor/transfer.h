#pragma once

#include "tensor/tensor.h"

namespace tessera {

/// y = convert(x), x broadcasting to y, from one device to another. Conversion and layout changes happen on
/// the GPU or the CPU side, the bus sees packed or pitched rows. To the host it waits; from pageable host
/// memory the driver stages; from page-locked memory it does not wait. Throws while a graph is being
/// captured, unless it is an upload from page-locked memory, which then lives as long as the graph.
void transfer(const Tensor& y, const Tensor& x);

/// Page-locked host memory (cudaMallocHost); ordinary host memory where there is no GPU. A block that was
/// freed is used again only when the work that keep_until_done() was told of is done.
Allocator& pinned_allocator();

/// Work that was just issued to `gpu` reads or writes the memory of `host`: if that is page-locked, it is not
/// used for another tensor before the work is done, and a graph being captured keeps it as long as it lives.
/// Copies do this by themselves; kernels that reach into the host's memory need it.
void keep_until_done(const Tensor& host, Device gpu);

}  // namespace tessera
