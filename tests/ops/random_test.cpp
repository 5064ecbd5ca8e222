#include "ops/random/random.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <utility>

#include "tensor/finite.h"
#include "tests/errors.h"
#include "tests/ops/expect.h"
#include "tests/tensors.h"

namespace tessera::ops {
namespace {

TEST(RandomFills, RefuseWhatTheyCannotFill) {
  Rng rng(1);
  const Tensor words = Tensor::zeros({4}, DType::i32, Device::cpu()),
               wide = Tensor::zeros({400}, DType::i64, Device::cpu()),
               x = Tensor::zeros({4}, DType::f32, Device::cpu());
  for (const Tensor& tensor : {words, wide}) {
    expect_error([&] { fill_uniform(tensor, 0, 1, rng); }, {"fill_uniform", "expected f64, f32"});
    expect_error([&] { fill_normal(tensor, 0, 1, rng); }, {"fill_normal", "expected f64, f32"});
  }
  expect_error([&] { fill_integers(x, 5, rng); }, {"fill_integers: f32[4]", "expected i64 or i32"});
  expect_error([&] { fill_integers(words, (int64_t(1) << 31) + 1, rng); }, {"i32 does not hold"});
  expect_error([&] { fill_uniform(Tensor(), 0, 1, rng); }, {"undefined"});
  const Tensor expanded = Tensor::zeros({1, 3}, DType::f32, kCpu).expand({2, 3});
  expect_error([&] { fill_uniform(expanded, 0, 1, rng); }, {"fill_uniform", "f32[2, 3]", "expanded"});
  expect_error([&] { fill_normal(expanded, 0, 1, rng); }, {"fill_normal", "f32[2, 3]", "expanded"});
  fill_normal(Tensor::empty({9, 0}, DType::f32, kCpu), 0, 1, rng);  // no elements, none that share memory
  const Tensor whole = Tensor::zeros({3}, DType::i64, kCpu).expand({2, 3});
  expect_error([&] { fill_integers(whole, 5, rng); }, {"fill_integers", "i64[2, 3]", "expanded"});
  const Tensor drawn = Tensor::zeros({3}, DType::f32, Device::cpu());
  for (const double deviation : {-1.0, std::nan("")})
    expect_error([&] { fill_normal(drawn, 0, deviation, rng); },
                 {"fill_normal: the deviation of f32[3] on cpu is", "expected 0 or more"});
  fill_normal(drawn, 2, 0, rng);
  EXPECT_EQ(drawn.to_vector<double>(), std::vector<double>(3, 2.0));
  fill_integers(words, int64_t(1) << 31, rng);
  for (const int32_t word : words.to_vector<int32_t>()) EXPECT_GE(word, 0);
  fill_integers(wide, int64_t(1) << 40, rng);
  int64_t largest = 0;
  for (const int64_t word : wide.to_vector<int64_t>()) largest = std::max(largest, word);
  EXPECT_GT(largest, int64_t(1) << 38);
}

TEST(RandomFills, UniformsStayBelowTheirUpperEnd) {
  Rng rng(2);
  const double wide = double(int64_t{1} << 24);  // f32 has every second number from there on
  for (const DType dtype : {DType::f64, DType::f32, DType::bf16, DType::f16})
    for (const auto& [low, high] : {std::pair(0.0, 1.0),
                                    {-1.0, 1.0},
                                    {-2.0, -1.0},
                                    {-1.0, 0.0},
                                    {1.0, 2.0},
                                    {wide, wide + 8},
                                    {wide, wide + 7}}) {
      if (low == wide && size_of(dtype) == 2) continue;
      const Tensor x = Tensor::empty({1 << 16}, dtype, Device::cpu());
      fill_uniform(x, low, high, rng);
      const auto [least, most] = std::ranges::minmax(values(x));
      EXPECT_GE(least, low) << dtype << " [" << low << ", " << high << ")";
      EXPECT_LT(most, high) << dtype << " [" << low << ", " << high << ")";
      // The numbers next to high occur: one in 500 draws or more of them is rounded to the last one.
      if (size_of(dtype) == 2) EXPECT_GE(most, high - 2 * epsilon(dtype)) << dtype << " " << high;
    }
  const Tensor same = Tensor::empty({100}, DType::bf16, Device::cpu());
  fill_uniform(same, 3, 3, rng);
  for (const double value : values(same)) EXPECT_EQ(value, 3);
}

TEST(RandomFills, RefuseWhatIsNotFinite) {
  Rng rng(1);
  const Tensor x = Tensor::empty({3}, DType::f32, Device::cpu()),
               wide = Tensor::empty({3}, DType::f64, Device::cpu()),
               half = Tensor::empty({3}, DType::f16, Device::cpu());
  constexpr double kInf = std::numeric_limits<double>::infinity();
  expect_error([&] { fill_uniform(x, -kInf, 1, rng); }, {"fill_uniform", "too wide for f32[3]"});
  expect_error([&] { fill_uniform(x, -3e38, 3e38, rng); }, {"too wide"});
  expect_error([&] { fill_uniform(wide, 0, 1e300, rng); }, {"too wide for f64[3]", "computed in f32"});
  expect_error([&] { fill_uniform(half, 0, 1e6, rng); }, {"too wide for f16[3]"});
  expect_error([&] { fill_normal(x, kInf, 1, rng); }, {"fill_normal", "not finite in f32[3]"});
  expect_error([&] { fill_normal(half, 0, 1e6, rng); }, {"not finite in f16[3]"});
  fill_uniform(half, -65504, 65504, rng);
  EXPECT_FALSE(find_nonfinite(half));
}

TEST(Permutation, HasEveryNumberOnceAndIsThatOfItsStream) {
  for (const Device device : devices())
    for (const int64_t n : {0, 1, 2, 1000, 40001}) {
      Rng rng(7), again(7);
      const Tensor order = permutation(n, rng, device);
      EXPECT_EQ(order.dtype(), DType::i64);
      EXPECT_EQ(order.to_vector<int64_t>(), permutation(n, again).to_vector<int64_t>());  // that of the CPU
      if (n > 2) EXPECT_NE(order.to_vector<int64_t>(), permutation(n, rng, device).to_vector<int64_t>());
      std::vector<int64_t> sorted = order.to_vector<int64_t>();
      std::sort(sorted.begin(), sorted.end());
      for (int64_t i = 0; i < n; ++i) ASSERT_EQ(sorted[size_t(i)], i);
    }
  Rng rng(1);
  expect_error([&] { permutation(-1, rng); }, {"permutation", "-1"});
}

TEST(Permutation, AllOrdersOfThreeAreEquallyLikely) {
  Rng rng(3);
  std::map<std::vector<int64_t>, int> counts;
  constexpr int kDraws = 6000;
  for (int draw = 0; draw < kDraws; ++draw) ++counts[permutation(3, rng).to_vector<int64_t>()];
  EXPECT_EQ(counts.size(), 6u);
  for (const auto& [order, count] : counts) EXPECT_NEAR(count, kDraws / 6, 150);  // 5 deviations of 29
}

}  // namespace
}  // namespace tessera::ops
