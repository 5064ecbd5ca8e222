#include "ops/linear/linear_swiglu_sm90.cuh"

namespace tessera::ops {

template void linear_swiglu_sm90<f16>(const Tensor& y, const Tensor& h, const Tensor& x, const Tensor& weight,
                                      bool wide);

}  // namespace tessera::ops
