#pragma once

#include "ops/sparse24/weight24.h"

namespace tessera::ops {

/// mask i32 [R, ceil(C / 32)], written, of weight [R, C]; neither is empty.
void transposable24_cpu(const Tensor& mask, const Tensor& weight);
void transposable24_cuda(const Tensor& mask, const Tensor& weight);

}  // namespace tessera::ops
