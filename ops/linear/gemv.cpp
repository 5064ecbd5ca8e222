#include "ops/linear/gemv_kernels.h"

#include <limits>

#include "ops/gemm/gemm_models_internal.h"

namespace tessera::ops {
namespace {

bool in_packs(const Tensor& x) {
  const int64_t pack = 16 / int64_t(size_of(x.dtype()));
  return x.layout().stride(1) == 1 && reinterpret_cast<uintptr_t>(x.raw()) % 16 == 0 &&
         (x.size(0) == 1 || x.layout().stride(0) % pack == 0);
}

}  // namespace

Reason gemv_lacks(const Tensor& x, const Tensor& weight, const Gpu& gpu) {
  if (gpu.major < 9) return "a GPU of compute capability 9.0";
  if (x.size(0) > kGemvTokens || x.size(0) == 0) return "1 ... 8 rows of x";
  if (weight.size(0) == 0 || weight.size(1) == 0) return "a weight that is not empty";
  if (std::max(weight.size(0), weight.size(1)) > std::numeric_limits<int32_t>::max() / 4)
    return "fewer elements";
  if (!in_packs(x) || !in_packs(weight)) return "operands whose rows start on 16-byte boundaries";
  return {};
}

bool gemv_pays(const Tensor& x, const Tensor& weight, const Gpu& gpu) {
  return !gemv_is_slower(weight.dtype(), weight.size(0), weight.size(1), x.size(0), gpu);
}

}  // namespace tessera::ops
