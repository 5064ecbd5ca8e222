#include "tensor/precision.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "tests/errors.h"

namespace tessera {
namespace {

TEST(Precision, HasANameThatReadsBack) {
  const Precision tf32(DType::f32, F32Math::tf32);
  for (const Precision precision :
       {Precision(DType::f64), Precision(DType::f32), tf32, Precision(DType::bf16), Precision(DType::f16)})
    EXPECT_EQ(parse_precision(name_of(precision)), precision) << precision;
  EXPECT_STREQ(name_of(tf32), "tf32");
  EXPECT_NE(tf32, Precision(DType::f32));
  for (const char* wrong : {"i64", "fp32", "TF32", "f8e4m3", ""})
    EXPECT_NE(message_of([&] { parse_precision(wrong); }).find("expected f64, f32, tf32, bf16 or f16"),
              std::string::npos)
        << wrong;
}

TEST(Precision, TheDefaultOfACpuIsF32AndOfANewGpuBf16) {
  EXPECT_EQ(default_precision(Device::cpu()), Precision(DType::f32));
  if (Device::cuda_count() == 0) GTEST_SKIP() << "skipped: no GPU";
  const Device gpu = Device::cuda(0);
  EXPECT_EQ(default_precision(gpu), Precision(gpu.info().major >= 8 ? DType::bf16 : DType::f32));
}

TEST(Precision, Tf32KeepsTenBitsAndRoundsTiesAway) {
  EXPECT_EQ(epsilon(Precision(DType::f32, F32Math::tf32)), 0x1p-10);
  EXPECT_EQ(epsilon(Precision(DType::bf16)), 0x1p-7);
  const float infinity = std::numeric_limits<float>::infinity();
  for (const float sign : {1.0f, -1.0f}) {
    EXPECT_EQ(round_to_tf32(sign * 1.0f), sign * 1.0f);
    EXPECT_EQ(round_to_tf32(sign * (1 + 0x1p-10f)), sign * (1 + 0x1p-10f));
    EXPECT_EQ(round_to_tf32(sign * (1 + 0x1p-11f)), sign * (1 + 0x1p-10f)) << "a tie";
    EXPECT_EQ(round_to_tf32(sign * (1 + 0x1p-11f - 0x1p-23f)), sign);
    EXPECT_EQ(round_to_tf32(sign * (1 + 3 * 0x1p-11f)), sign * (1 + 0x1p-9f)) << "a tie";
    EXPECT_EQ(round_to_tf32(sign * (2 - 0x1p-23f)), sign * 2.0f) << "into the next binade";
    EXPECT_EQ(round_to_tf32(sign * infinity), sign * infinity);
    EXPECT_EQ(round_to_tf32(sign * 0x1p-126f), sign * 0x1p-126f);
  }
  EXPECT_TRUE(std::isnan(round_to_tf32(std::numeric_limits<float>::quiet_NaN())));
  EXPECT_TRUE(std::isnan(round_to_tf32(std::bit_cast<float>(0x7FFFFFFFu))));
  EXPECT_TRUE(std::isnan(round_to_tf32(std::bit_cast<float>(0xFFFFFFFFu))));
}

TEST(Precision, TheRoundedCopyOfAViewLeavesItAsItWas) {
  const Tensor whole =
      Tensor::from(std::vector<float>{1.0001f, 2.0001f, 3.0001f, 4.0001f, 5.0001f, 6.0001f}, {2, 3});
  const Tensor view = whole.transpose(0, 1).slice(0, 1, 3);
  const auto before = view.to_vector<float>();
  std::vector<float> want;
  for (const float x : before) want.push_back(round_to_tf32(x));
  EXPECT_NE(want, before);
  EXPECT_EQ(rounded_to_tf32(view).to_vector<float>(), want);
  EXPECT_EQ(view.to_vector<float>(), before);
  EXPECT_EQ(rounded_to_tf32(view).shape(), view.shape());
}

}  // namespace
}  // namespace tessera
