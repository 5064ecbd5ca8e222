#pragma once

#include "ops/attention/attention.h"

namespace tessera::ops {

/// Attention within one tensor that holds queries, keys and values, as one product makes them: qkv
/// [B, L, 3 H, D], along the third dimension first the query heads, then the key heads, then the value heads
/// -> [B, L, H, D].
///
/// The same kernels on the same elements as `attention` of the three slices, and the same results; but the
/// gradient of qkv is written in its place, while the gradients of three slices would be added to a zeroed
/// whole: 24 B L H D bytes less in 16 bits.
Tensor self_attention(const Tensor& qkv, const AttentionOptions& options = {}, Site site = Site::here());

}  // namespace tessera::ops
