#include <gtest/gtest.h>

#include <cmath>
#include <optional>
#include <utility>

#include "tensor/tensor.h"

/// A canary for the guard checker itself: the operator checks rest on it, so errors of the kind that a kernel
/// makes are planted here, and it must report each.

namespace tessera {
namespace {

class Guard : public testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    if (std::string(GetParam()) == "cuda" && Device::cuda_count() == 0) GTEST_SKIP() << "skipped: no GPU";
    device_ = Device::parse(GetParam());
    device_->allocator().set_guard(4096);
  }
  void TearDown() override {
    if (device_) device_->allocator().set_guard(0);
  }

  Device device() const { return *device_; }
  /// Writes one element of `row` at `column` of a [rows, width] tensor, in it or beyond, as a wrong kernel
  /// would.
  void plant(const Tensor& tensor, int64_t row, int64_t column) const {
    Layout layout;
    layout.offset = row * tensor.row_stride() + column;
    // A view that lies about the bytes: view_of checks, so the size is put out of the way for its lifetime.
    const size_t bytes = std::exchange(tensor.storage()->bytes, size_t(1) << 40);
    Tensor::view_of(tensor.storage(), layout, tensor.dtype()).fill(1.0);
    tensor.storage()->bytes = bytes;
  }
  std::string report() const {
    try {
      device().allocator().check_guards();
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  }

 private:
  std::optional<Device> device_;
};

TEST_P(Guard, ReportsAWriteBehindTheLastRow) {
  const MemoryTag tag("canary");
  const Tensor y = Tensor::empty({3, 5}, DType::f32, device());
  y.fill(0);
  EXPECT_EQ(report(), "") << "a correct kernel";
  plant(y, 3, 0);  // a row too many
  const std::string said = report();
  EXPECT_NE(said.find("after"), std::string::npos) << said;
  EXPECT_NE(said.find("canary"), std::string::npos) << said;
  // Leave no damage behind for others.
  const size_t bytes = std::exchange(y.storage()->bytes, size_t(1) << 40);
  Layout layout;
  layout.offset = 3 * y.row_stride();
  Tensor::view_of(y.storage(), layout, DType::i32).fill(-1);
  y.storage()->bytes = bytes;
  EXPECT_EQ(report(), "");
}

TEST_P(Guard, ReportsAWriteThatWasFreedSince) {
  {
    const Tensor y = Tensor::empty({7}, DType::bf16, device());
    plant(y, 0, 8);  // 14 bytes, rounded up to 16: element 8 is the first outside
  }
  EXPECT_NE(report().find("after"), std::string::npos);
  EXPECT_EQ(report(), "");
}

TEST_P(Guard, UnwrittenElementsAreNan) {
  const Tensor y = Tensor::empty({4, 3}, DType::f32, device());
  y.slice(0, 0, 3).fill(0);  // a kernel that forgets the last row
  const auto values = y.to_vector<float>();
  for (size_t i = 0; i < values.size(); ++i) EXPECT_EQ(std::isnan(values[i]), i >= 9) << i;
  for (const DType dtype : {DType::bf16, DType::f16, DType::f8e4m3, DType::f64})
    EXPECT_TRUE(std::isnan(Tensor::empty({1}, dtype, device()).item<double>())) << dtype;
}

INSTANTIATE_TEST_SUITE_P(Devices, Guard, testing::Values("cpu", "cuda"),
                         [](const auto& info) { return std::string(info.param); });

}  // namespace
}  // namespace tessera
