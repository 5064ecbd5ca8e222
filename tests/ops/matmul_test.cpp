#include "ops/matmul/matmul.h"

#include <gtest/gtest.h>

#include "autograd/gradcheck.h"
#include "tests/errors.h"
#include "tests/ops/tensors.h"

namespace tessera::ops {
namespace {

// a b = {{19, 22}, {43, 50}}; with dy = {{1, 2}, {0, 1}}: da = dy b^T, db = a^T dy. Small integers: exact.
TEST(Matmul, ByHandInEveryDtype) {
  for (const DType dtype : {DType::f64, DType::f32, DType::bf16, DType::f16}) {
    Tensor a = Tensor::from(std::vector<double>{1, 2, 3, 4}, {2, 2}).to(dtype);
    Tensor b = Tensor::from(std::vector<double>{5, 6, 7, 8}, {2, 2}).to(dtype);
    require_grad(a), require_grad(b);
    Tape tape;
    const Tensor y = matmul(a, b);
    EXPECT_EQ(y.to_vector<double>(), (std::vector<double>{19, 22, 43, 50})) << dtype;
    const Tensor dy = Tensor::from(std::vector<double>{1, 2, 0, 1}, {2, 2}).to(dtype);
    tape.backward(std::vector{y}, std::vector{dy});
    EXPECT_EQ(grad(a).to_vector<double>(), (std::vector<double>{17, 23, 6, 8})) << dtype;
    EXPECT_EQ(grad(b).to_vector<double>(), (std::vector<double>{1, 5, 2, 8})) << dtype;
  }
}

TEST(Matmul, LeadingDimensionsBroadcastBothWays) {
  const auto check_shapes = [](const Shape& a, const Shape& b, bool transpose_a, bool transpose_b) {
    const auto result = gradcheck(
        [&](const std::vector<Tensor>& in) {
          return std::vector{matmul(in[0], in[1], transpose_a, transpose_b)};
        },
        {quarters(a), quarters(b)});
    EXPECT_TRUE(result.ok) << a << b << ": " << result.message;
  };
  check_shapes({2, 1, 3, 4}, {3, 4, 2}, false, false);
  check_shapes({3, 4, 3}, {2, 1, 4, 2}, true, false);
  check_shapes({2, 1, 3, 4}, {1, 3, 2, 4}, false, true);
  check_shapes({2, 3, 2, 4}, {4, 3}, false, false);
  check_shapes({4, 2}, {2, 3, 3, 4}, true, true);
  const Tensor a = quarters({2, 1, 3, 4}), b = quarters({5, 4, 2}), y = matmul(a, b);
  ASSERT_EQ(y.shape(), Shape({2, 5, 3, 2}));
  for (int64_t i = 0; i < 2; ++i)
    for (int64_t j = 0; j < 5; ++j)
      EXPECT_EQ(y.select(0, i).select(0, j).to_vector<double>(),
                matmul(a.select(0, i).select(0, 0), b.select(0, j)).to_vector<double>());
}

TEST(Matmul, AnExpandedGradientIsRead) {
  Tensor a = quarters({3, 2}), b = quarters({2, 4});
  require_grad(a), require_grad(b);
  Tape tape;
  const Tensor y = matmul(a, b);
  tape.backward(std::vector{y}, std::vector{Tensor::full({}, 2, DType::f64, Device::cpu()).expand({3, 4})});
  const auto in_b = b.to_vector<double>(), da = grad(a).to_vector<double>();
  for (int64_t i = 0; i < 3; ++i)
    for (int64_t k = 0; k < 2; ++k) {
      double sum = 0;
      for (int64_t j = 0; j < 4; ++j) sum += 2 * in_b[size_t(k * 4 + j)];
      EXPECT_EQ(da[size_t(i * 2 + k)], sum);
    }
}

TEST(Matmul, TheSameTensorTwice) {
  const auto result = gradcheck(
      [](const std::vector<Tensor>& in) {
        return std::vector{matmul(in[0], in[0]), matmul(in[0], in[0], true, false)};
      },
      {quarters({3, 3})});
  EXPECT_TRUE(result.ok) << result.message;
}

// A sum of 257 ones over the batch: bf16 holds 256 and 258 only, so a sum rounded at each step would stop at
// 256.
TEST(Matmul, BroadcastGradientsAreSummedInF32) {
  Tensor b = Tensor::full({1, 1}, 1, DType::bf16, Device::cpu());
  require_grad(b, DType::f32);
  for (const bool strided : {false, true}) {
    const Tensor wide = Tensor::full({257, 2, 1}, 1, DType::bf16, Device::cpu());
    Tape tape;
    const Tensor y = matmul(strided ? wide.slice(1, 0, 1) : wide.reshape({514, 1, 1}).slice(0, 0, 257), b);
    tape.backward(std::vector{y}, std::vector{Tensor::full(y.shape(), 1, DType::bf16, Device::cpu())});
    EXPECT_EQ(grad(b).item(), strided ? 2 * 257 : 257);  // the second adds to the leaf's buffer
  }
}

TEST(Matmul, MessagesNameShapesDtypesAndDevices) {
  const Tensor a = quarters({2, 3}), b = quarters({4, 5});
  EXPECT_EQ(message_of([&] { matmul(a, b); }),
            "matmul: a [2, 3] does not match b [4, 5]: sums over 3 and 4 elements");
  EXPECT_EQ(message_of([&] { matmul(a, b, true, true); }),
            "matmul: a [2, 3] transposed does not match b [4, 5] transposed: sums over 2 and 5 elements");
  EXPECT_EQ(
      message_of([&] { matmul(quarters({3}), b); }),
      "matmul: a [3] and b [4, 5] need at least two dimensions each; expected [..., M, K] and [..., K, N]");
  EXPECT_EQ(message_of([&] {
              matmul(quarters({2, 3, 4}), quarters({3, 4, 5}));
            }),
            "matmul: shapes [2] and [3] do not broadcast: 2 against 3 in dimension -1");
  EXPECT_EQ(
      message_of([&] {
        matmul(a, quarters({3, 2}, DType::f32));
      }),
      "matmul: b is f32[3, 2] on cpu, but the first operand is f64[2, 3] on cpu; cast or move one of them");
  EXPECT_EQ(
      message_of([&] {
        matmul(quarters({2, 3}, DType::i64), b);
      }),
      "matmul: a i64[2, 3] on cpu: dtype i64 is not supported on device cpu; expected f64, f32, bf16 or f16");
  EXPECT_EQ(message_of([&] { matmul(a, Tensor()); }), "matmul: b is undefined");
}

}  // namespace
}  // namespace tessera::ops
