#pragma once

#include "runtime/rng.h"
#include "tensor/tensor.h"

namespace tessera::ops {

/// Fills a tensor from one stream of `rng`, by each element's row-major index: the same on the CPU and on a
/// GPU (normals up to the last bits of log and cos), whatever the layout. Values are computed in f32.
/// Uniform in [low, high), rounded to the dtype; a value that would round up to `high` becomes the largest
/// number of the dtype below it. Throws unless the dtype is floating, as does fill_normal, which draws from
/// N(mean, deviation^2). All three throw for an expanded tensor, whose elements share memory.
void fill_uniform(const Tensor& tensor, double low, double high, const Rng& rng, Site site = Site::here());
/// Throws unless the dtype is floating and deviation >= 0.
void fill_normal(const Tensor& tensor, double mean, double deviation, const Rng& rng,
                 Site site = Site::here());
/// Integers in [0, high) in an i64 or i32 tensor, which holds high - 1; high >= 1.
void fill_integers(const Tensor& tensor, int64_t high, const Rng& rng, Site site = Site::here());

/// The numbers 0 ... n - 1 in a random order, i64 [n]: the same on the CPU and on a GPU. It is the order of n
/// random numbers of 63 bits from one stream, so that up to some millions all orders are equally likely
/// within the chance that two of them are equal (n^2 2^-64). ops::gather_rows(x, permutation(x.size(0), rng))
/// shuffles rows. Throws if n is negative.
Tensor permutation(int64_t n, const Rng& rng, Device device = Device::cpu(), Site site = Site::here());

}  // namespace tessera::ops
