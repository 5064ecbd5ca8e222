#pragma once

#include "ops/pointwise/pointwise.h"

namespace tessera::ops {

enum class Binary : uint8_t { add, sub, mul, div, maximum, minimum, floor_div, remainder };
enum class Comparison : uint8_t { less, less_equal, greater, greater_equal, equal };
enum class Unary : uint8_t {
  exp,
  log,
  tanh,
  sigmoid,
  sqrt,
  abs,
  square,
  rsqrt,
  sin,
  cos,
  softplus,
  scale,
  shift,
  reciprocal,
  pow,
  clamp
};
const char* name_of(Binary kind);
const char* name_of(Comparison kind);
const char* name_of(Unary kind);

/// The numbers of a function: the factor of scale, the offset of shift, the dividend of reciprocal, the
/// exponent of pow, both bounds of clamp.
template <class C>
struct Numbers {
  C a = 0, b = 0;
};

/// y = a op b; a and b broadcast to y. y has their dtype or, in a product or quotient, their compute dtype.
void binary_cpu(const Tensor& y, const Tensor& a, const Tensor& b, Binary kind);
void binary_cuda(const Tensor& y, const Tensor& a, const Tensor& b, Binary kind);

/// The same of i64 and i32, of which alone there are floor_div and remainder, and maximum and minimum of
/// bool.
void integer_binary_cpu(const Tensor& y, const Tensor& a, const Tensor& b, Binary kind);
void integer_binary_cuda(const Tensor& y, const Tensor& a, const Tensor& b, Binary kind);

/// The gradient of the operand `mine` of a quotient (its divisor), maximum or minimum, at dy's shape; d's
/// dtype as y's above.
void operand_gradient_cpu(const Tensor& d, const Tensor& dy, const Tensor& mine, const Tensor& other,
                          Binary kind);
void operand_gradient_cuda(const Tensor& d, const Tensor& dy, const Tensor& mine, const Tensor& other,
                           Binary kind);

/// The gradient of an operand that broadcasts, summed to d, which is f32 and has its shape: of a product
/// (which does not need `mine`), of a quotient's divisor, or of a maximum or minimum. `other` has dy's shape.
/// `d_other`, undefined or of dy's shape and dtype, takes its gradient in the same pass, which needs `mine`.
/// Returns false, and has done nothing, where dy, `other` and `d_other` lie differently, where d_other's rows
/// end inside a pack and not with row padding of its own, or where what is summed takes more than one pass.
bool summed_gradient_cuda(const Tensor& d, const Tensor& dy, const Tensor& mine, const Tensor& other,
                          Binary kind, const Tensor& d_other = {});

/// Both gradients of a product, quotient, maximum or minimum of operands of dy's shape, in one pass. Returns
/// false, and has done nothing, where rows are not whole packs (gpu::elementwise_pair).
bool both_gradients_cuda(const Tensor& da, const Tensor& db, const Tensor& dy, const Tensor& a,
                         const Tensor& b, Binary kind);
/// The same of where: da = mask ? dy : 0, db = mask ? 0 : dy.
bool both_gradients_cuda(const Tensor& da, const Tensor& db, const Tensor& dy, const Tensor& mask);

/// y, which is bool, = a op b.
void compare_cpu(const Tensor& y, const Tensor& a, const Tensor& b, Comparison kind);
void compare_cuda(const Tensor& y, const Tensor& a, const Tensor& b, Comparison kind);

/// y = mask ? a : b; all broadcast to y.
void where_cpu(const Tensor& y, const Tensor& mask, const Tensor& a, const Tensor& b);
void where_cuda(const Tensor& y, const Tensor& mask, const Tensor& a, const Tensor& b);
void integer_where_cuda(const Tensor& y, const Tensor& mask, const Tensor& a, const Tensor& b);

void unary_cpu(const Tensor& y, const Tensor& x, Unary kind, Numbers<double> numbers = {});
void unary_cuda(const Tensor& y, const Tensor& x, Unary kind, Numbers<double> numbers = {});

/// scale, shift, abs, square and clamp of i64 and i32, which hold the numbers.
void integer_unary_cpu(const Tensor& y, const Tensor& x, Unary kind, Numbers<int64_t> numbers);
void integer_unary_cuda(const Tensor& y, const Tensor& x, Unary kind, Numbers<int64_t> numbers);

/// What backward needs of a function: its result, or else x.
inline bool keeps_result(Unary kind) {
  return kind == Unary::exp || kind == Unary::tanh || kind == Unary::sigmoid || kind == Unary::sqrt;
}
void unary_backward_cpu(const Tensor& dx, const Tensor& dy, const Tensor& kept, Unary kind,
                        Numbers<double> numbers = {});
void unary_backward_cuda(const Tensor& dx, const Tensor& dy, const Tensor& kept, Unary kind,
                         Numbers<double> numbers = {});

}  // namespace tessera::ops
