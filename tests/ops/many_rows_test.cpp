#include <gtest/gtest.h>

#include "ops/activation/activation.h"
#include "ops/norm/norm.h"
#include "ops/softmax/softmax.h"

/// More than 2^31 rows and elements on a GPU. Tensors of one column: the most rows for the memory (at most 18
/// GB at a time). What is looked at are the ends, and both sides of 2^30, 2^31 and 2^32 bytes and elements,
/// where an index in 32 bits would wrap.

namespace tessera::ops {
namespace {

constexpr int64_t kRows = (int64_t{1} << 31) + 12345;
constexpr int64_t kEdges[] = {0, int64_t{1} << 29, int64_t{1} << 30, int64_t{1} << 31, kRows - 8};

/// The value at the 16 rows about an edge.
float value_at(int64_t row) {
  return float(row % 7) - 2;
}

Tensor window(const Tensor& rows, int64_t edge) {
  const int64_t first = std::max<int64_t>(0, edge - 8);
  return rows.slice(0, first, std::min(rows.size(0), first + 16));
}

/// Of 3s, but value_at about the edges.
Tensor marked(Device device) {
  const Tensor x = Tensor::full({kRows, 1}, 3, DType::bf16, device);
  for (const int64_t edge : kEdges) {
    const Tensor part = window(x, edge);
    std::vector<float> values;
    const int64_t first = std::max<int64_t>(0, edge - 8);
    for (int64_t i = 0; i < part.size(0); ++i) values.push_back(value_at(first + i));
    part.copy_from(Tensor::from(values, {part.size(0), 1}).to(DType::bf16).to(device));
  }
  return x;
}

/// y is f of the marks, and the same in every other row: the mean shows a row that was left out.
template <class F>
void expect_rows(const Tensor& y, F&& f) {
  for (const int64_t edge : kEdges) {
    const int64_t first = std::max<int64_t>(0, edge - 8);
    const auto values = window(y, edge).to_vector<float>();
    for (size_t i = 0; i < values.size(); ++i)
      EXPECT_NEAR(values[i], f(value_at(first + int64_t(i))), 0x1p-6) << first + int64_t(i);
  }
}

class SlowManyRows : public testing::Test {
 protected:
  void SetUp() override {
    if (Device::cuda_count() == 0) GTEST_SKIP() << "skipped: no GPU";
    if (Device::cuda(0).info().memory_bytes < size_t{24} << 30)
      GTEST_SKIP() << "skipped: less than 24 GiB of memory";
  }
};

TEST_F(SlowManyRows, Activation) {
  const Tensor x = marked(Device::cuda(0));
  expect_rows(relu(x), [](float v) { return std::max(v, 0.0f); });
}

TEST_F(SlowManyRows, Rmsnorm) {
  const Tensor x = marked(Device::cuda(0));
  expect_rows(rmsnorm(x), [](float v) { return v == 0 ? 0.0f : v > 0 ? 1.0f : -1.0f; });
}

TEST_F(SlowManyRows, Softmax) {
  const Tensor x = marked(Device::cuda(0));
  expect_rows(softmax(x, 1), [](float) { return 1.0f; });
}

}  // namespace
}  // namespace tessera::ops
