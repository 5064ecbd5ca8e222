#pragma once

#include "ops/mlp/mlp_sparse24.h"

namespace tessera::ops {

/// slopes = S'(a) f'(h), by a = f(h) and what S made of it, `kept` (0 where it kept nothing), for the methods
/// that change values: by mvue S' is kept / a, by the soft methods `scale` (f32 [1]). Of one shape and
/// floating dtype; written to `slopes`, which may be `kept`.
void slopes24(const Tensor& slopes, const Tensor& a, const Tensor& kept, const Selection24& selection,
              Activation kind);
void slopes24_cpu(const Tensor& slopes, const Tensor& a, const Tensor& kept, const Selection24& selection,
                  Activation kind);
void slopes24_cuda(const Tensor& slopes, const Tensor& a, const Tensor& kept, const Selection24& selection,
                   Activation kind);

/// x += factor * value: x [T, F] floating, value of rank 0, f32 (f64 for f64). The sum is f32 (f64), rounded
/// once.
void add_to_all_cpu(const Tensor& x, const Tensor& value, double factor);
void add_to_all_cuda(const Tensor& x, const Tensor& value, double factor);

}  // namespace tessera::ops
