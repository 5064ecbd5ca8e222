#include <gtest/gtest.h>

#include <cstdlib>

#include "ops/activation/activation_kernels.h"
#include "runtime/has_cuda.h"

/// The checkers must be able to fail. A kernel is told that its output has one row more than was allocated:
/// the guard bands must notice, and compute-sanitizer too (tools/gpu sets TESSERA_PLANT_OVERRUN for that run,
/// without guard bands).

namespace tessera::ops {
namespace {

/// A tensor that claims more elements than its storage holds, made through the storage's byte count.
Tensor overlong(const Tensor& tensor, int64_t claimed) {
  auto lie = std::make_shared<Storage>(tensor.device(), tensor.device().allocator(), tensor.storage()->bytes);
  lie->bytes = size_t(claimed) * size_of(tensor.dtype());
  return Tensor::view_of(lie, Layout::packed({claimed}), tensor.dtype());
}

TEST(Canary, PlantedOverrunIsCaught) {
  if (Device::cuda_count() == 0) GTEST_SKIP() << "skipped: no GPU";
  if constexpr (kCuda) {
    const Device gpu = Device::cuda(0);
    const bool for_sanitizer = std::getenv("TESSERA_PLANT_OVERRUN") != nullptr;
    // Past the end of a whole driver allocation for the sanitizer, past a guarded block for the guard bands.
    const int64_t count = for_sanitizer ? (int64_t(8) << 20) / 4 : 1000;
    const int64_t claimed = for_sanitizer ? count + (int64_t(64) << 20) / 4 : 1100;
    if (!for_sanitizer) gpu.allocator().set_guard(4096);
    {
      const Tensor x = Tensor::zeros({claimed}, DType::f32, gpu);
      const Tensor y = overlong(Tensor::empty({count}, DType::f32, gpu), claimed);
      activation_forward_cuda(y, x, Activation::relu);
      if (for_sanitizer) {
        gpu.synchronize();
        return;
      }
      EXPECT_THROW(gpu.allocator().check_guards(), Error);
    }
    gpu.allocator().set_guard(0);
    EXPECT_THROW(gpu.allocator().check_guards(), Error);  // noticed again when the block was freed
  }
}

}  // namespace
}  // namespace tessera::ops
