#pragma once

#include "tensor/tensor.h"

namespace tessera::ops {

/// What stands between the projection of new tokens and their attention, in one launch:
///   q' = rope(q)    rows lengths[b] - n ... lengths[b] - 1 of keys = rope(k), of values = v
/// at the positions of those rows, with q, k and v the heads of qkv [B, n, H + 2 Hk, D], in this order; as
/// ops::rope and ops::append_to_cache do it, one after the other, with the same rounding.
///   table [P, R]    as ops::rope wants it: f32 (f64 for f64)
///   lengths [B]     i32 or i64, on the device: tokens of each sequence, the n new ones included
///   keys, values [B, capacity, Hk, D], written in place -> q' [B, n, H, D]
/// A length outside n ... min(capacity, P) is an error on the CPU; on CUDA that sequence's q' is NaN and
/// nothing of it is written. Any strides of the first three dimensions; elements of a head that are not
/// adjacent are copied first in qkv, and an error in a cache. Throws if a gradient would be needed.
Tensor rope_to_cache(const Tensor& qkv, const Tensor& table, const Tensor& lengths, Tensor& keys,
                     Tensor& values, Site site = Site::here());

}  // namespace tessera::ops
