#pragma once

#include "nn/form.h"

/// The GEMMs of the forms made of factors; for nn/linear.cpp.

namespace tessera::nn {

Tensor multiply_factors(const LowRank& form, const Tensor& x, const Tensor& bias, const Tensor& residual);
Tensor multiply_factors(const Cola& form, const Tensor& x, const Tensor& bias, const Tensor& residual);
Tensor multiply_factors(const SparsePlusLowRank& form, const Tensor& x, const Tensor& bias,
                        const Tensor& residual);
Tensor multiply_factors(const ColumnsPlusLowRank& form, const Tensor& x, const Tensor& bias,
                        const Tensor& residual);

}  // namespace tessera::nn
