#pragma once

#include "runtime/rng.h"
#include "tensor/tensor.h"

namespace tessera::ops {

/// Fills a tensor from one stream of `rng`, by each element's row-major index: the same on the CPU and on a
/// GPU (normals up to the last bits of log and cos), whatever the layout. Values are computed in f32.
/// Uniform in [low, high), rounded to the dtype; a value that would round up to `high` becomes the largest
/// number of the dtype below it. Throws unless the dtype is floating, as does fill_normal, which draws from
/// N(mean, deviation^2). All three throw for an expanded tensor, whose elements share memory.
void fill_uniform(const Tensor& tensor, double low, double high, Rng& rng);
/// Throws unless the dtype is floating and deviation >= 0.
void fill_normal(const Tensor& tensor, double mean, double deviation, Rng& rng);
/// Integers in [0, high) in an i64 or i32 tensor, which holds high - 1; high >= 1.
void fill_integers(const Tensor& tensor, int64_t high, Rng& rng);

}  // namespace tessera::ops
