#pragma once

#include "ops/variant.h"
#include "tensor/tensor.h"

/// The parts of a linear layer that linear, grouped_linear and mlp share.

namespace tessera {
class Backward;  // autograd/backward.h
struct GradTarget;
}  // namespace tessera

namespace tessera::ops {

/// Throws, naming operator and operands, unless x [..., in], weight [out, in] and bias [out] (or undefined)
/// go together.
void check_linear(const char* op, const char* weight_name, const Tensor& x, int64_t in, const Tensor& weight,
                  const Tensor& bias);

/// Throws unless `residual` is undefined or goes with an output of shape `y` of x's dtype and device.
void check_residual(const char* op, const Tensor& x, const Shape& y, const Tensor& residual);

/// The shape of x weight^T + bias + residual. Throws as the two above, and unless x [..., in] is an operand.
Shape check_linear_call(const char* op, const Tensor& x, const Tensor& weight, const Tensor& bias,
                        const Tensor& residual);

/// What linear chooses for x as a matrix: "gemv" or "gemm", which is multiply's choice.
std::string_view linear_variant(const Tensor& rows, const Tensor& weight, const Gpu& gpu);

/// y = x weight^T + bias + residual
void linear_forward(const Tensor& y, const Tensor& x, const Tensor& weight, const Tensor& bias,
                    const Tensor& residual = {});
/// dy weight, in dy's dtype
Tensor linear_input_gradient(const Tensor& dy, const Tensor& weight);
/// Gives dy weight as the gradient of input `input` of the entry, of shape `shape`, if it needs one: added in
/// place to an existing gradient, and rounded once.
void linear_input_gradient(Backward& entry, int input, const Shape& shape, const Tensor& dy,
                           const Tensor& weight);
/// Hands dweight = dy^T x and dbias to those inputs of the entry that want them; x may be undefined if the
/// weight does not. `dy_sums`: partial sums of dy's columns that came with it (Backward::column_sums), which
/// leave the GEMM without sums; undefined: dy is summed here.
void linear_parameter_gradients(Backward& entry, int weight_input, int bias_input, const Tensor& weight,
                                const Tensor& x, const Tensor& dy, const Tensor& dy_sums = {});

/// Hands dweight = dy^T x to input number `input` of the entry, if it wants one: x [..., in], dy [rows, out].
void linear_weight_gradient(Backward& entry, int input, const Tensor& weight, const Tensor& x,
                            const Tensor& dy);

/// Where a GEMM may write the column sums of dy [tokens, out], f32 and packed, for the bias that is input
/// `input`: the leaf's buffer or new memory; undefined if no gradient is needed. If the GEMM has written
/// them, call entry.written(input, it).
GradTarget bias_sums(Backward& entry, int input, const Tensor& dy);

/// Gives the column sums of dy as the gradient of input `input`, if it needs one: written or added in place
/// if its memory is packed, else in the dtype that it is stored in, so that no cast is needed.
void bias_gradient(Backward& entry, int input, const Tensor& dy, bool groups = false);

/// x [..., columns] summed over all rows, or x [rows, groups, columns] over its rows if `groups`: f32 (f64
/// for f64), packed, of shape [columns] or [groups, columns]. Deterministic. On CUDA one launch where x is
/// small.
Tensor column_sums(const Tensor& x, bool groups = false);

/// What column_sums chooses on a GPU for x [rows, groups, columns]: "narrow", a GEMM with a row of ones, or
/// "kernel".
std::string_view column_sums_variant(const Tensor& x, const Gpu& gpu);

/// sums [groups, columns], packed, of x [rows, groups, columns] whose innermost stride is 1; nothing is
/// empty.
void column_sums_cpu(const Tensor& sums, const Tensor& x);
void column_sums_cuda(const Tensor& sums, const Tensor& x);

}  // namespace tessera::ops
