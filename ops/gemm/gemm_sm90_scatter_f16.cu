#include "ops/gemm/gemm_sm90_scatter.cuh"

namespace tessera::ops {

template void gemm_scatter_sm90<f16>(const Gemm& gemm, const GemmScatter& scatter, const GemmChoice& choice,
                                     Device device);

}  // namespace tessera::ops
