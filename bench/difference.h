#pragma once

#include "ops/verify.h"

namespace tessera::bench {

/// As ops::compare, for large results on a GPU: y in bf16, f16 or f32, the reference in f32, of one shape.
/// Where they differ most is not said (Errors::at stays -1). Waits for the device.
ops::Errors difference_cuda(const Tensor& y, const Tensor& reference);

}  // namespace tessera::bench
