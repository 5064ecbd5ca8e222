#include "ops/linear/linear_activation_sm90.cuh"

namespace tessera::ops {

template void linear_activation_sm90<f16>(const Tensor& y, const Tensor& counts, const Tensor& x,
                                          const Tensor& weight, const Tensor& bias, Activation kind,
                                          bool wide);

}  // namespace tessera::ops
