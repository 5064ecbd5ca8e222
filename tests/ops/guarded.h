#pragma once

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tensor/tensor.h"

namespace tessera::ops {

/// Small integers: sums of products of them are exact in f32, so the result must equal that of plain loops.
inline Tensor small_numbers(const Shape& shape, int64_t seed) {
  std::vector<float> values(size_t(shape.count()));
  for (size_t i = 0; i < values.size(); ++i)
    values[i] = float((int64_t(i) * 7 + int64_t(i) / 13 + seed) % 5 - 2);
  return Tensor::from(values, shape);
}

/// Tests of kernels between guard bands: skipped without a GPU of compute capability `kMajor` (0: any), and
/// at the end no band may have been overwritten.
template <int kMajor>
class GuardedCuda : public testing::Test {
 protected:
  void SetUp() override {
    if (Device::cuda_count() == 0 || (kMajor && gpu().info().major != kMajor))
      GTEST_SKIP() << (kMajor ? "skipped: no GPU of compute capability " + std::to_string(kMajor) + ".0"
                              : std::string("skipped: no GPU"));
    gpu().allocator().set_guard(4096);
  }
  void TearDown() override {
    if (Device::cuda_count() == 0) return;
    gpu().synchronize();
    gpu().allocator().set_guard(0);
    EXPECT_NO_THROW(gpu().allocator().check_guards());
  }
  static Device gpu() { return Device::cuda(0); }
};

}  // namespace tessera::ops
