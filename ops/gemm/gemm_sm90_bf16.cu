#include "ops/gemm/gemm_sm90_rows.cuh"

namespace tessera::ops {

template void product_sm90<bf16>(const Gemm& gemm, const ProductChoice& choice, Device device);

}  // namespace tessera::ops
