#pragma once

#include "ops/inverse_factor/inverse_factor.h"

namespace tessera::ops {

/// u [n, n] packed; a [n, n] packed, shift [n] packed, of u's dtype. False, with u spoilt, if there is no
/// factor.
[[nodiscard]] bool inverse_factor_cpu(const Tensor& u, const Tensor& a, const Tensor& shift);
[[nodiscard]] bool inverse_factor_cuda(const Tensor& u, const Tensor& a, const Tensor& shift);

}  // namespace tessera::ops
