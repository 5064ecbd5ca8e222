#pragma once

#include "tensor/tensor.h"

namespace tessera::ops {

/// x in another dtype, of x's shape. Values convert as in tensor/dtype.h: floating types round to nearest
/// even, f8e4m3 saturates, floating to integer truncates toward zero and saturates (NaN becomes 0), any to
/// bool asks whether it is not 0. From and to every dtype, on both devices.
///
/// Gradient: between f64, f32, bf16 and f16, dx is dy converted to x's dtype. A result in any other dtype has
/// none. Nothing is saved. A cast to x's own dtype shares x's elements.
Tensor cast(const Tensor& x, DType to, Site site = Site::here());

}  // namespace tessera::ops
