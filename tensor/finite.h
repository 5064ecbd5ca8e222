#pragma once

#include "tensor/tensor.h"

namespace tessera {

/// The result of find_nonfinite.
struct NonFinite {
  int64_t nan = 0, inf = 0;
  int64_t first = -1;  // row-major index of the first one
  explicit operator bool() const { return nan + inf > 0; }
};

/// Looks at every element of a floating tensor, on the host, some MiB at a time: a tool for hunting, not for
/// every step. Waits for the device.
NonFinite find_nonfinite(const Tensor& tensor);

}  // namespace tessera
