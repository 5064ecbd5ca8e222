#pragma once

#include "ops/pointwise/pointwise.h"

/// Arithmetic of tensors as expressions, found by argument-dependent lookup: `0.5 * a * a + b / 2`. Each
/// operator is one call of a function of ops/pointwise, with its rules of broadcasting, gradients and
/// rounding.

namespace tessera {

/// An operand, with the line of the expression: an operator's parameters cannot have default arguments.
struct Operand {
  Operand(const Tensor& tensor, Site site = Site::here()) : tensor(tensor), site(site) {}
  const Tensor& tensor;  // outlives the expression
  Site site;
};

inline Tensor operator+(const Operand& a, const Tensor& b) {
  return ops::add(a.tensor, b, a.site);
}
inline Tensor operator-(const Operand& a, const Tensor& b) {
  return ops::sub(a.tensor, b, a.site);
}
inline Tensor operator*(const Operand& a, const Tensor& b) {
  return ops::mul(a.tensor, b, a.site);
}
inline Tensor operator/(const Operand& a, const Tensor& b) {
  return ops::div(a.tensor, b, a.site);
}
inline Tensor operator-(const Operand& a) {
  return ops::neg(a.tensor, a.site);
}

inline Tensor operator+(const Operand& a, double b) {
  return ops::shift(a.tensor, b, a.site);
}
inline Tensor operator+(double a, const Operand& b) {
  return ops::shift(b.tensor, a, b.site);
}
inline Tensor operator-(const Operand& a, double b) {
  return ops::shift(a.tensor, -b, a.site);
}
/// Two operations, -b and a shift; exact apart from the last rounding.
inline Tensor operator-(double a, const Operand& b) {
  return ops::shift(ops::neg(b.tensor, b.site), a, b.site);
}
inline Tensor operator*(const Operand& a, double b) {
  return ops::scale(a.tensor, b, a.site);
}
inline Tensor operator*(double a, const Operand& b) {
  return ops::scale(b.tensor, a, b.site);
}
/// a times 1 / b.
inline Tensor operator/(const Operand& a, double b) {
  return ops::scale(a.tensor, 1 / b, a.site);
}
inline Tensor operator/(double a, const Operand& b) {
  return ops::reciprocal(b.tensor, a, b.site);
}

}  // namespace tessera
