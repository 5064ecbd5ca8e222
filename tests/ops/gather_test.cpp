#include "ops/gather/gather.h"

#include <gtest/gtest.h>

#include <cmath>

#include "autograd/tape.h"
#include "ops/op.h"
#include "ops/shape/shape.h"
#include "tests/errors.h"
#include "tests/ops/tensors.h"

namespace tessera::ops {
namespace {

Tensor indices(std::vector<int64_t> values) {
  return Tensor::from(values, {int64_t(values.size())});
}

TEST(GatherRows, ByHandWithBothIndexDtypes) {
  const Tensor x = counting({3, 2}), at = indices({2, 0, 2});
  const std::vector<double> expected{4, 5, 0, 1, 4, 5};
  EXPECT_EQ(gather_rows(x, at).to_vector<double>(), expected);
  EXPECT_EQ(gather_rows(x, at.to(DType::i32)).to_vector<double>(), expected);
  EXPECT_EQ(gather_rows(counting({3}), at).to_vector<double>(), (std::vector<double>{2, 0, 2}));
}

TEST(GatherRows, MovesEveryDtypeBitForBit) {
  for (const DType dtype : {DType::f64, DType::f32, DType::bf16, DType::f16, DType::f8e4m3, DType::i64,
                            DType::i32, DType::u8, DType::boolean}) {
    const Tensor x = Tensor::from(std::vector<double>{1, 0, 3, 2, 1, 0}, {3, 2}).to(dtype);
    EXPECT_EQ(gather_rows(x, indices({1})).to_vector<double>(), x.slice(0, 1, 2).to_vector<double>())
        << dtype;
  }
}

TEST(GatherRows, NarrowRowsWithGapsOrOfTwoDimensions) {
  const Tensor x = counting({5, 7, 4}), at = indices({4, 0, 4, 2});
  for (const Tensor& rows : {x.slice(2, 1, 2), x.slice(1, 2, 3), x.slice(1, 1, 5), x.slice(2, 1, 3),
                             x.transpose(1, 2), x.slice(1, 0, 0)}) {
    const Tensor y = gather_rows(rows, at);
    ASSERT_EQ(y.shape(), (Shape{4, rows.size(1), rows.size(2)}));
    const int64_t numbers[] = {4, 0, 4, 2};
    for (int64_t n = 0; n < 4; ++n)
      EXPECT_EQ(y.slice(0, n, n + 1).to_vector<double>(),
                rows.slice(0, numbers[n], numbers[n] + 1).to_vector<double>());
    const auto sums = scatter_rows(rows.slice(0, 0, 4), at, 5);
    const auto first = rows.slice(0, 0, 1).to_vector<double>(),
               third = rows.slice(0, 2, 3).to_vector<double>();
    const auto both = sums.slice(0, 4, 5).to_vector<double>();
    for (size_t i = 0; i < both.size(); ++i) EXPECT_EQ(both[i], first[i] + third[i]);
    for (const double zero : sums.slice(0, 1, 2).to_vector<double>()) EXPECT_EQ(zero, 0);
  }
}

TEST(GatherRows, RepeatedRowsAddTheirGradients) {
  Tensor x = counting({3, 1});
  require_grad(x);
  Tape tape;
  const Tensor y = gather_rows(x, indices({1, 1, 2}));
  tape.backward(std::vector{y}, std::vector{Tensor::from(std::vector<double>{1, 10, 100}, {3, 1})});
  EXPECT_EQ(grad(x).to_vector<double>(), (std::vector<double>{0, 11, 100}));
}

TEST(ScatterRows, AddsRepeatedIndicesAndClearsTheRest) {
  const Tensor y = scatter_rows(counting({3, 2}), indices({3, 1, 3}), 4);
  EXPECT_EQ(y.to_vector<double>(), (std::vector<double>{0, 0, 2, 3, 0, 0, 4, 6}));
}

TEST(ScatterRows, SumsBf16WithoutRoundingOnTheWay) {
  // 256 + 1 is not a bf16; added one by one in bf16 the ones would vanish.
  std::vector<double> values(9, 1.0);
  values[0] = 256;
  const Tensor x = Tensor::from(values, {9}).to(DType::bf16);
  EXPECT_EQ(scatter_rows(x, indices(std::vector<int64_t>(9, 0)), 1).item<double>(), 264);
}

TEST(ScatterRows, TheOrderOfTheSumIsThatOfThePositions) {
  // In f64, 2^53 + 1 - 2^53 is 0 in this order and 1 with the last two exchanged.
  const float big = 9007199254740992.0f;
  const Tensor forward = Tensor::from(std::vector<float>{big, 1, -big}, {3});
  const Tensor exchanged = Tensor::from(std::vector<float>{big, -big, 1}, {3});
  EXPECT_EQ(scatter_rows(forward, indices({0, 0, 0}), 1).item<float>(), 0.0f);
  EXPECT_EQ(scatter_rows(exchanged, indices({0, 0, 0}), 1).item<float>(), 1.0f);
}

TEST(ScatterRows, NoRowsAndNoIndices) {
  EXPECT_EQ(scatter_rows(counting({0, 3}), indices({}), 2).to_vector<double>(), std::vector<double>(6, 0.0));
  EXPECT_EQ(scatter_rows(counting({0, 3}), indices({}), 0).shape(), (Shape{0, 3}));
  EXPECT_EQ(gather_rows(counting({0, 3}), indices({})).shape(), (Shape{0, 3}));
}

TEST(GatherRows, ErrorsNamePositionAndValue) {
  const Tensor x = counting({3, 2});
  expect_parts(message_of([&] {
                 gather_rows(x, indices({0, 3}));
               }),
               {"gather_rows", "index 3", "position 1", "3 rows"});
  expect_parts(message_of([&] { gather_rows(x, indices({-1})); }), {"index -1", "position 0"});
  expect_parts(message_of([&] {
                 scatter_rows(x, indices({0, 9, 1}), 4);
               }),
               {"scatter_rows", "index 9", "position 1"});
  expect_parts(message_of([&] { scatter_rows(x, indices({0}), 4); }), {"scatter_rows", "3 rows", "has 1"});
  expect_parts(message_of([&] { scatter_rows(x, indices({0, 0, 0}), -1); }), {"scatter_rows", "-1"});
  expect_parts(message_of([&] { gather_rows(x, x); }), {"gather_rows", "f64[3, 2]", "i64 or i32"});
  expect_parts(message_of([&] { scatter_rows(indices({1}), indices({0}), 1); }),
               {"scatter_rows", "i64", "cpu"});
  expect_parts(message_of([&] { gather_rows(Tensor(), indices({0})); }), {"gather_rows", "undefined"});
  expect_parts(message_of([&] { gather_rows(Tensor::zeros({}, DType::f32, Device::cpu()), indices({0})); }),
               {"gather_rows", "at least one dimension"});
}

TEST(GatherRows, AnIndexWrittenInPlaceIsNoticed) {
  Tensor x = counting({3});
  require_grad(x);
  const Tensor at = indices({0, 1});
  Tape tape;
  const Tensor y = gather_rows(x, at);
  at.fill(2);
  expect_parts(message_of([&] { tape.backward(std::vector{y}, std::vector{counting({2})}); }),
               {"gather_rows", "written in place"});
}

// ---- on a GPU ----

class GatherCuda : public testing::Test {
 protected:
  void SetUp() override {
    if (Device::cuda_count() == 0) GTEST_SKIP() << "skipped: no GPU";
  }
};

TEST_F(GatherCuda, OutOfRangeGivesNanRowsAndIsLeftOutOfSums) {
  const Device gpu = Device::cuda();
  for (const int64_t width : {1, 3, 8, 129}) {
    Tensor x = Tensor::full({3, width}, 2.0, DType::f32, gpu);
    require_grad(x);
    const Tensor at = indices({1, -1, 3, 1}).to(gpu);
    {
      Tape tape;
      const Tensor y = gather_rows(x, at);
      const auto values = y.detach().to_vector<float>();
      for (int64_t i = 0; i < 4 * width; ++i)
        EXPECT_EQ(std::isnan(values[size_t(i)]), i / width == 1 || i / width == 2) << i;
      tape.backward(std::vector{y}, std::vector{Tensor::full({4, width}, 1.0, DType::f32, gpu)});
      EXPECT_EQ(grad(x).slice(0, 1, 2).to_vector<float>(), std::vector<float>(size_t(width), 2.0f));
      EXPECT_EQ(grad(x).slice(0, 0, 1).to_vector<float>(), std::vector<float>(size_t(width), 0.0f));
    }
    Tensor four = Tensor::full({4, width}, 1.0, DType::f32, gpu);
    require_grad(four);
    Tape tape;
    const Tensor sums = scatter_rows(four, at, 3);
    EXPECT_EQ(sums.detach().slice(0, 1, 2).to_vector<float>(), std::vector<float>(size_t(width), 2.0f));
    tape.backward(std::vector{sums}, std::vector{Tensor::full({3, width}, 5.0, DType::f32, gpu)});
    EXPECT_EQ(grad(four).slice(0, 1, 3).to_vector<float>(), std::vector<float>(size_t(2 * width), 0.0f));
    EXPECT_EQ(grad(four).slice(0, 3, 4).to_vector<float>(), std::vector<float>(size_t(width), 5.0f));
  }
}

TEST_F(GatherCuda, ManyPositionsOfFewRowsEqualTheCpu) {
  // Sums of small integers are exact in f32, so the orders of CPU and GPU give the same bits. Rows cross
  // chunks of 32 positions at every offset.
  for (const int64_t rows : {1, 2, 7, 100})
    for (const int64_t count : {1, 31, 32, 33, 64, 65, 1000, 4097}) {
      std::vector<int64_t> at(static_cast<size_t>(count));
      for (size_t n = 0; n < at.size(); ++n) at[n] = int64_t(n * n * 7 + n) % rows;
      std::vector<float> values(size_t(count) * 5);
      for (size_t i = 0; i < values.size(); ++i) values[i] = float(i % 17);
      const Tensor x = Tensor::from(values, {count, 5});
      const Tensor expected = scatter_rows(x, indices(at), rows);
      const Tensor got = scatter_rows(x.to(Device::cuda()), indices(at).to(Device::cuda()), rows);
      EXPECT_EQ(got.to_vector<float>(), expected.to_vector<float>()) << rows << " rows, " << count;
    }
}

TEST(Gather, ARowOfManyIsSummedInDoubleOnTheCpu) {
  // Added in f32, a million equal terms that are no powers of two are off by more than 1e-4.
  constexpr int64_t kLength = 1'000'000;
  const Tensor x = Tensor::full({kLength, 1}, 0.1, DType::f32, Device::cpu()),
               at = Tensor::full({kLength}, 1, DType::i64, Device::cpu());
  EXPECT_EQ(scatter_rows(x, at, 3).to_vector<float>(),
            (std::vector<float>{0, float(kLength * double(0.1f)), 0}));
}

}  // namespace
}  // namespace tessera::ops
