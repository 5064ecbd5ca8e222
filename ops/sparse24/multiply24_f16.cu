#include "ops/sparse24/multiply24_launch.cuh"

namespace tessera::ops {

template void multiply24_sm90<f16>(const SparseGemm24& gemm, int tile, Device device);

}  // namespace tessera::ops
