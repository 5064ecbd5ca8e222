#pragma once

#include <string>

#include "tensor/tensor.h"

namespace tessera::nn {

/// The weights `name` in another floating dtype. Throws, with the number of them and the largest, if finite
/// values would become infinite.
Tensor narrowed(const Tensor& tensor, DType dtype, const std::string& name);

/// Copies the weights `name` into `to`, a part of a parameter, and rounds them to its dtype. Throws as
/// narrowed does.
void copy_narrowed(const Tensor& to, const Tensor& from, const std::string& name);

}  // namespace tessera::nn
