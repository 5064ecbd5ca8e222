#include "ops/gemm/gemm_sm90_fitted_launch.cuh"

namespace tessera::ops {

template void gemm_fitted_sm90<f16>(const Gemm& gemm, const GemmChoice& choice, Device device);

}  // namespace tessera::ops
