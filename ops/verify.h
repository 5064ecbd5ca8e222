#pragma once

#include "ops/op.h"
#include "tensor/precision.h"

/// How the tests verify an operator; shared by tests/ops/cases_test.cpp and `tessera bench sweep`.

namespace tessera::ops {

struct Results {
  std::vector<Tensor> outputs;    // on the device where they were made, off the tape
  std::vector<Tensor> gradients;  // of the differentiable inputs; undefined where none arrived
};

/// Runs forward and, if `grads` is not empty and anything is differentiable, backward. `grads`: one for every
/// output, undefined for those that have no gradient.
Results run_with_gradients(const OpSpec& op, std::vector<Tensor> inputs, const Attrs& attrs,
                           const std::vector<Tensor>& grads);

/// Random gradients of the outputs, in their dtypes, on `device`; undefined for those that have none.
std::vector<Tensor> make_gradients(const OpSpec& op, const std::vector<Tensor>& outputs, Device device,
                                   uint64_t seed);
/// The oracle's gradients: those on the CPU that make_gradients() gave, in f64 but for outputs with a dtype
/// of their own, such as a loss in f32.
std::vector<Tensor> oracle_gradients(const OpSpec& op, const std::vector<Tensor>& gradients);

struct Errors {
  double largest = 0, reference = 0;  // max |y - ref|, max |ref|
  int64_t at = -1;                    // where y differs most, in row-major order
};
/// NaN agrees with NaN and an infinity with itself; anything else that is not finite differs by infinity.
Errors compare(const Tensor& y, const Tensor& reference);

/// The precision by which a result y of the operator is judged: its dtype, and `math` if it is f32 and the
/// operator honours that.
Precision precision_of(const OpSpec& op, const Tensor& y, F32Math math);
/// The tolerance rule: max|y - ref| <= k max|baseline - ref| + 2 ulp max|ref|, with the ulp and the factor
/// of y's precision. For TF32 the ulp is 2^-10: tensor cores that truncate an operand are off by up to one.
/// 0 for integers: those agree or are wrong. Throws if the baseline's error is not finite: nothing can be
/// judged by a baseline that is wrong itself.
double tolerance(const OpSpec& op, Precision precision, double baseline_error, double largest_reference);

/// Allowed error of the CPU, the baseline of that rule: max|y - ref| <= (64 eps32 + 2 ulp) max|ref| per
/// tensor, with 64 eps of f32 (f64 for f64) for its sums and 2 ulp of y's precision for rounding (in TF32 of
/// the operands); 0 for integers. OpSpec::cpu_extra_ulp adds to the 2 where intermediates are rounded to 16
/// bits.
double cpu_tolerance(const OpSpec& op, Precision precision, double largest_reference);

}  // namespace tessera::ops
