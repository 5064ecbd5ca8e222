#include "ops/gemm/gemm_sm90_pair.cuh"

namespace tessera::ops {

template void product_pair_sm90<f16>(const Gemm& first, const Gemm& second, const ProductChoice& choice,
                                     Device device);

}  // namespace tessera::ops
