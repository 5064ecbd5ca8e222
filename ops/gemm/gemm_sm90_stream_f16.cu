#include "ops/gemm/gemm_sm90_stream_launch.cuh"

namespace tessera::ops {

template void product_stream_sm90<f16>(const Gemm& gemm, const ProductChoice& choice, Device device);
template void swiglu_stream_sm90<f16>(const Gemm& gemm, const ProductChoice& choice, Device device);

}  // namespace tessera::ops
