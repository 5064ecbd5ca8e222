#include "ops/mlp/mlp_up.cuh"

namespace tessera::ops {

template void fused_up_cuda<f16>(const Tensor& a, const Tensor& h, const Tensor& x, const Tensor& up,
                                 const Tensor& bias, Activation kind);

}  // namespace tessera::ops
