#pragma once

#include "ops/factor/factor.h"

/// All tensors packed and of a's dtype and device. Signs are as they fall.

namespace tessera::ops {

/// What a factorisation reports: 0, or LAPACK's info; -1: an element of the result is not finite.
[[nodiscard]] int qr_cpu(const Tensor& q, const Tensor& r, const Tensor& a);
[[nodiscard]] int qr_cuda(const Tensor& q, const Tensor& r, const Tensor& a);

[[nodiscard]] int svd_cpu(const Tensor& u, const Tensor& s, const Tensor& vt, const Tensor& a);
[[nodiscard]] int svd_cuda(const Tensor& u, const Tensor& s, const Tensor& vt, const Tensor& a);

}  // namespace tessera::ops
