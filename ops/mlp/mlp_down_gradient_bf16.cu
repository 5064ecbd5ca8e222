#include "ops/mlp/mlp_down_gradient.cuh"

namespace tessera::ops {

template void fused_down_gradient_cuda<bf16>(const Tensor& dh, const Tensor& a, const Tensor& dy,
                                             const Tensor& down, const Tensor& h, Activation kind);

}  // namespace tessera::ops
