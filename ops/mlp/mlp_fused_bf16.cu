#include "ops/mlp/mlp_fused_sm90.cuh"

namespace tessera::ops {

template void fused_mlp_cuda<bf16>(const Tensor& y, const Tensor& x, const Tensor& up, const Tensor& down,
                                   const Tensor& up_bias, const Tensor& down_bias, const Tensor& residual,
                                   Activation kind);

}  // namespace tessera::ops
