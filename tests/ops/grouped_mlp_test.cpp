#include "ops/grouped_mlp/grouped_mlp.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "ops/grouped_linear/grouped_linear.h"
#include "ops/grouped_mlp/grouped_mlp_kernels.h"
#include "runtime/has_cuda.h"
#include "tests/ops/expect.h"
#include "tests/ops/tensors.h"

namespace tessera::ops {
namespace {

// The same kernels in the same order: bitwise the composition, forward and backward.
TEST(GroupedMlp, IsTheCompositionOfThree) {
  for (const DType dtype : {DType::f64, DType::f32, DType::bf16, DType::f16}) {
    std::vector<Tensor> one{eighths({2, 3, 5}, dtype, 1), eighths({4, 9, 5}, dtype, 2),
                            eighths({4, 3, 9}, dtype, 3)};
    std::vector<Tensor> three;
    for (Tensor& each : one) {
      three.push_back(each.clone());
      require_grad(each);
      require_grad(three.back());
    }
    const Tensor dy = eighths({2, 3, 4, 3}, dtype, 6);
    std::vector<double> y_one, y_three;
    {
      Tape tape;
      const Tensor y = grouped_mlp(one[0], one[1], one[2], Activation::silu);
      y_one = y.to_vector<double>();
      tape.backward(std::vector{y}, std::vector{dy});
    }
    {
      Tape tape;
      const Tensor y = grouped_linear(silu(grouped_linear(three[0], three[1])), three[2], {}, false);
      y_three = y.to_vector<double>();
      tape.backward(std::vector{y}, std::vector{dy});
    }
    EXPECT_EQ(y_one, y_three) << dtype;
    for (size_t i = 0; i < one.size(); ++i)
      EXPECT_EQ(grad(one[i]).to_vector<double>(), grad(three[i]).to_vector<double>())
          << dtype << " input " << i;
  }
}

TEST(GroupedMlp, KeepsOneTensorOfHiddenRows) {
  Tensor x = eighths({64, 8}, DType::f64, 1), up = eighths({4, 512, 8}, DType::f64, 2),
         down = eighths({4, 3, 512}, DType::f64, 3);
  require_grad(up);
  Tape tape;
  const auto allocated = [] { return Device::cpu().allocator().stats().allocated; };
  const size_t before = allocated();
  const Tensor y = grouped_mlp(x, up, down, Activation::silu);
  const size_t kept = allocated() - before, hidden = size_t(64) * 4 * 512 * 8;
  EXPECT_GE(kept, hidden);
  EXPECT_LT(kept, hidden + hidden / 8);
}

TEST(GroupedMlp, SaysWhichOperandDoesNotFit) {
  const Tensor x = eighths({2, 5}, DType::f32, 1), up = eighths({4, 9, 5}, DType::f32, 2);
  const auto message = [&](const Tensor& u, const Tensor& d) -> std::string {
    try {
      grouped_mlp(x, u, d, Activation::silu);
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  };
  EXPECT_NE(message(eighths({4, 9, 6}, DType::f32, 1), up).find("expected [K, F, 5]"), std::string::npos);
  EXPECT_NE(message(up, eighths({4, 3, 8}, DType::f32, 1)).find("expected [4, E, 9]"), std::string::npos);
  EXPECT_NE(message(up, eighths({4, 3, 9}, DType::f64, 1)).find("down"), std::string::npos);
}

TEST(GroupedMlp, GeluTanhsSlopeIsNoughtOrOneWhereTheSquareOverflows) {
  // h = x = 3e19, whose square is infinite in f32; on a GPU this is variant "wgmma".
  std::vector<double> eye(64 * 64, 0.0), first(3 * 64, 0.0);
  for (size_t i = 0; i < 64; ++i) eye[i * 65] = first[i] = 1;
  std::vector<double> values(16 * 64), expected;
  for (size_t i = 0; i < values.size(); ++i) {
    values[i] = i % 2 ? -3e19 : 3e19;
    expected.push_back(i % 2 ? 0 : 1);
  }
  for (const Device device : devices()) {
    const Tensor up = Tensor::from(eye, {1, 64, 64}).to(DType::bf16).to(device),
                 down = Tensor::from(first, {1, 3, 64}).to(DType::bf16).to(device),
                 dy = Tensor::full({16, 1, 3}, 1, DType::bf16, device);
    const auto dx =
        gradient_of(Tensor::from(values, {16, 64}).to(DType::bf16).to(device), dy,
                    [&](const Tensor& x) { return grouped_mlp(x, up, down, Activation::gelu_tanh); });
    EXPECT_EQ(dx.to_vector<double>(), expected) << device.name();
  }
}

TEST(GroupedMlp, LaunchesCountIn32Bits) {
  // Tiles of 128 rows times groups times up to 16 splits stay below 2^31, by half, and so do the rows.
  for (const int64_t groups : {int64_t{1}, int64_t{3}, int64_t{10}, int64_t{1000}, kMostMlpGroups}) {
    const int64_t rows = grouped_mlp_launch_rows(groups);
    EXPECT_EQ(rows % 128, 0) << groups;
    EXPECT_GE(rows, 128) << groups;
    EXPECT_LE(rows, int64_t{1} << 30) << groups;
    EXPECT_LE(rows / 128 * groups * 16, int64_t{1} << 30) << groups;
    // Not smaller than need be: ten times the rows of the bundled model's largest case run in one launch.
    if (groups <= 10) EXPECT_GE(rows, 5'000'000) << groups;
  }
}

TEST(GroupedMlp, SeveralLaunchesAreOne) {
  // What more than 2^30 rows run as, with a limit of 128 and 256: rows do not depend on their launch, and the
  // second weight's gradient is the sum over the launches.
  if (Device::cuda_count() == 0) GTEST_SKIP() << "skipped: no GPU";
  if constexpr (kCuda) {
    const Device gpu = Device::cuda(0);
    const int64_t rows = 600, groups = 3, in = 72, wide = 136, out = 3;
    const Tensor x = eighths({rows, in}, DType::bf16, 1).to(gpu),
                 up = eighths({groups, wide, in}, DType::bf16, 2).to(gpu),
                 down = eighths({groups, out, wide}, DType::bf16, 3).to(gpu),
                 dy = eighths({rows, groups, out}, DType::bf16, 4).to(gpu);
    if (!grouped_mlp_wgmma_needs(x, up, down, Gpu(x.device())).empty())
      GTEST_SKIP() << "skipped: no variant wgmma";
    struct Results {
      std::vector<float> y, dh, ddown;
    };
    const auto run = [&](int64_t launch_rows) {
      const Tensor y = Tensor::empty({rows, groups, out}, DType::bf16, gpu),
                   dh = Tensor::empty({rows, groups, wide}, DType::bf16, gpu);
      grouped_mlp_forward_cuda(y, x, up, down, Activation::silu, launch_rows);
      const int64_t splits = grouped_mlp_gradient_splits(x, up, launch_rows);
      const Tensor parts = Tensor::empty_packed({splits, groups, out, wide}, DType::f32, gpu);
      grouped_mlp_hidden_gradient_cuda(dh, parts, dy, x, up, down, Activation::silu, launch_rows);
      std::vector<float> sums(size_t(groups * out * wide), 0.0f);
      const auto values = parts.to_vector<float>();
      for (size_t i = 0; i < values.size(); ++i) sums[i % sums.size()] += values[i];
      return Results{y.to_vector<float>(), dh.to_vector<float>(), sums};
    };
    const Results whole = run(1024);
    for (const int64_t launch_rows : {128, 256}) {
      const Results pieces = run(launch_rows);
      for (size_t i = 0; i < whole.y.size(); ++i)  // split columns are added in another order
        EXPECT_NEAR(pieces.y[i], whole.y[i], 0x1p-6 * (1 + std::abs(whole.y[i]))) << i;
      EXPECT_EQ(pieces.dh, whole.dh) << launch_rows;
      float largest = 0;
      for (const float value : whole.ddown) largest = std::max(largest, std::abs(value));
      for (size_t i = 0; i < whole.ddown.size(); ++i)
        EXPECT_NEAR(pieces.ddown[i], whole.ddown[i], 1e-5f * largest) << i;
    }
  }
}

}  // namespace
}  // namespace tessera::ops
