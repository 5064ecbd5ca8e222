#pragma once

#include "ops/pointwise/pointwise.h"

namespace tessera::ops {

enum class Binary : uint8_t { add, sub, mul, div };
enum class Unary : uint8_t { exp, log, tanh, sigmoid, sqrt };
const char* name_of(Binary kind);
const char* name_of(Unary kind);

/// y = a op b; a and b broadcast to y. y has their dtype or, in a product or quotient, their compute dtype.
void binary_cpu(const Tensor& y, const Tensor& a, const Tensor& b, Binary kind);
void binary_cuda(const Tensor& y, const Tensor& a, const Tensor& b, Binary kind);

/// db of a / b, at dy's shape; db's dtype as y's above.
void divisor_gradient_cpu(const Tensor& db, const Tensor& dy, const Tensor& a, const Tensor& b);
void divisor_gradient_cuda(const Tensor& db, const Tensor& dy, const Tensor& a, const Tensor& b);

/// y = factor x
void scale_cpu(const Tensor& y, const Tensor& x, double factor);
void scale_cuda(const Tensor& y, const Tensor& x, double factor);

void unary_cpu(const Tensor& y, const Tensor& x, Unary kind);
void unary_cuda(const Tensor& y, const Tensor& x, Unary kind);

/// `kept`: x of a logarithm, y of the others.
void unary_backward_cpu(const Tensor& dx, const Tensor& dy, const Tensor& kept, Unary kind);
void unary_backward_cuda(const Tensor& dx, const Tensor& dy, const Tensor& kept, Unary kind);

}  // namespace tessera::ops
