#include "nn/module.h"

namespace tessera::nn {

void make_parameter(Tensor& tensor) {
  const bool narrow = tensor.dtype() == DType::bf16 || tensor.dtype() == DType::f16;
  require_grad(tensor, narrow ? DType::f32 : tensor.dtype());
}

}  // namespace tessera::nn
