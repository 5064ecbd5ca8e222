#pragma once

#include "tensor/tensor.h"

namespace tessera::bench {

/// Brings a GPU into the same state before every measurement: its L2 cache is full of clean lines of `other`
/// (f32, packed, larger than the cache; what was written before has gone to memory), and it stays busy for a
/// tenth of a millisecond more, in which the host issues what is measured. bench/peers/timing.py does the
/// same.
void make_cold_cuda(const Tensor& other);

/// The driver's own copy of one packed tensor to another of its size: the ceiling of what moves memory.
void driver_copy_cuda(const Tensor& to, const Tensor& from);

}  // namespace tessera::bench
