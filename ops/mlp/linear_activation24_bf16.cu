#include "ops/mlp/linear_activation24_sm90.cuh"

namespace tessera::ops {

template void linear_activation24_sm90<bf16>(const LinearActivation24& to, const LinearActivation24Call& call,
                                             const Tensor& slots);

}  // namespace tessera::ops
