#pragma once

#include "tensor/tensor.h"

/// The kernels of attention on a GPU read heads in packs of 8 elements. A head_dim that is not a multiple of
/// 8 is padded with zeros: they add nothing to a score, and what they give in the output is dropped. Scores
/// are scaled by the true head_dim.

namespace tessera::ops {

/// Elements of a head as the kernels of the device see it.
int64_t padded_head_dim(int64_t head_dim, Device device);

/// to [..., padded] = from [..., head_dim], then zeros.
void copy_padded(const Tensor& to, const Tensor& from);

}  // namespace tessera::ops
