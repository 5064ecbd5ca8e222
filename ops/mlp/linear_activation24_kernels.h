#pragma once

#include <string>
#include <vector>

#include "ops/mlp/linear_activation24.h"
#include "ops/variant.h"

namespace tessera::ops {

/// Matrices off the tape.
struct LinearActivation24Call {
  Tensor x, weight, bias, columns;
  Activation kind;
};
std::string describe_problem(const LinearActivation24Call& call);
std::vector<std::string> linear_activation24_variants();
/// What variant "epilogue" needs and these operands or the GPU lack.
Reason linear_activation24_epilogue_lacks(const Tensor& x, const Tensor& weight, const Gpu& gpu);

/// slots[columns[i]] = i, all others -1: i32 [F], packed.
void column_slots_cuda(const Tensor& slots, const Tensor& columns);
/// Variant "epilogue" for T bf16 or f16: adds to the counts, which must be zero. `slots` undefined: no dense
/// columns.
template <class T>
void linear_activation24_sm90(const LinearActivation24& to, const LinearActivation24Call& call,
                              const Tensor& slots);

}  // namespace tessera::ops
