#include "ops/grouped_linear/grouped_linear.h"

#include <gtest/gtest.h>

#include "autograd/tape.h"
#include "ops/linear/linear.h"
#include "tests/errors.h"
#include "tests/ops/tensors.h"

namespace tessera::ops {
namespace {

TEST(GroupedLinear, IsOneLinearAGroup) {
  const Tensor weight = quarters({3, 4, 5}), bias = quarters({3, 4}, DType::f64, 2);
  for (const bool shared : {true, false}) {
    const Tensor x = shared ? quarters({2, 6, 5}, DType::f64, 1) : quarters({2, 6, 3, 5}, DType::f64, 1);
    const Tensor y = grouped_linear(x, weight, bias, shared);
    ASSERT_EQ(y.shape(), Shape({2, 6, 3, 4}));
    for (int64_t k = 0; k < 3; ++k)
      EXPECT_EQ(
          y.select(2, k).to_vector<double>(),
          linear(shared ? x : x.select(2, k), weight.select(0, k), bias.select(0, k)).to_vector<double>());
  }
}

// dx = 256 + 9 times 1 = 265, half way between 264 and 266: rounded once it is 264; rounded after each group
// it would stay at 256. Rows of 9 bf16 are pitched to 16, so the groups are added one by one.
TEST(GroupedLinear, SharedInputGradientRoundsOnce) {
  Tensor x = Tensor::full({2, 3}, 1, DType::bf16, Device::cpu());
  require_grad(x);
  const Tensor weight = Tensor::zeros({10, 9, 3}, DType::bf16, Device::cpu());
  weight.select(1, 0).fill(1);
  weight.select(0, 0).select(0, 0).fill(256);
  const Tensor dy = Tensor::full({2, 10, 9}, 1, DType::bf16, Device::cpu());
  Tape tape;
  tape.backward(std::vector{grouped_linear(x, weight)}, std::vector{dy});
  EXPECT_EQ(grad(x).to_vector<double>(), std::vector<double>(6, 264.0));
}

/// The same on a GPU, where the groups are one product whose k has gaps, with NaN in the gaps of dy.
TEST(GroupedLinear, SharedInputGradientRoundsOnceOnAGpuNextToPadsOfNaN) {
  if (Device::cuda_count() == 0) GTEST_SKIP() << "skipped: no GPU";
  const Device gpu = Device::cuda(0);
  for (const DType dtype : {DType::bf16, DType::f16}) {
    Tensor x = Tensor::full({300, 24}, 1, dtype, gpu);
    require_grad(x);
    const Tensor weight = Tensor::zeros({10, 1365, 24}, dtype, gpu);
    const double one_ulp_less = dtype == DType::bf16 ? 256 : 2048;  // adding 1 to it is lost
    weight.select(1, 0).fill(1);
    weight.select(0, 0).select(0, 0).fill(one_ulp_less);
    const Tensor dy = Tensor::empty({300, 10, 1365}, dtype, gpu);
    ASSERT_GT(dy.storage()->pitch_bytes, 0);
    Tensor::view_of(dy.storage(), Layout::packed({int64_t(dy.storage()->bytes)}), DType::u8).fill(0xFF);
    dy.fill(1);
    Tape tape;
    tape.backward(std::vector{grouped_linear(x, weight)}, std::vector{dy});
    EXPECT_EQ(grad(x).to_vector<double>(),
              std::vector<double>(300 * 24, dtype == DType::bf16 ? 264.0 : 2056.0));
  }
}

TEST(GroupedLinear, MessagesNameWhatDisagrees) {
  const Tensor weight = quarters({3, 4, 5});
  EXPECT_EQ(
      message_of([&] {
        grouped_linear(quarters({2, 6}), weight);
      }),
      "grouped_linear: x [2, 6] does not match weight [3, 4, 5]; expected [..., in] of weight [K, out, in]");
  EXPECT_EQ(message_of([&] {
              grouped_linear(quarters({2, 5}), weight, {}, false);
            }),
            "grouped_linear: x [2, 5] does not match weight [3, 4, 5]; expected [..., K, in] (not shared) of "
            "weight "
            "[K, out, in]");
  EXPECT_EQ(message_of([&] {
              grouped_linear(quarters({2, 5}), quarters({4, 5}));
            }),
            "grouped_linear: weight [4, 5] has not three dimensions; expected [K, out, in]");
  EXPECT_EQ(message_of([&] {
              grouped_linear(quarters({2, 5}), weight, quarters({4}));
            }),
            "grouped_linear: bias [4] does not go with weight [3, 4, 5]; expected [3, 4]");
}

}  // namespace
}  // namespace tessera::ops
