#include "ops/verify.h"

#include <gtest/gtest.h>

#include <cmath>

#include "tests/errors.h"

/// The rules by which the checks judge must be able to refuse.

namespace tessera::ops {
namespace {

Tensor vector(const std::vector<double>& values) {
  return Tensor::from(values, {int64_t(values.size())});
}

TEST(Verify, ComparesByTheLargestReference) {
  const Errors errors = compare(vector({1, 2.5, -4}), vector({1, 2, -4}));
  EXPECT_EQ(errors.largest, 0.5);
  EXPECT_EQ(errors.reference, 4);
  EXPECT_EQ(errors.at, 1);
  EXPECT_EQ(compare(vector({NAN, INFINITY}), vector({NAN, INFINITY})).largest, 0);
  EXPECT_EQ(compare(vector({NAN, 1}), vector({1, 1})).largest, INFINITY);
  EXPECT_EQ(compare(vector({1, 1}), vector({1, NAN})).largest, INFINITY);
  EXPECT_EQ(compare(vector({INFINITY}), vector({1})).largest, INFINITY);
}

TEST(Verify, ABaselineThatIsNotFiniteJudgesNothing) {
  const OpSpec& op = find_op("silu");
  EXPECT_EQ(tolerance(op, DType::bf16, 0.5, 4), op.tolerance_factor * 0.5 + 2 * 0x1p-7 * 4);
  for (const double error : {double(INFINITY), double(NAN)})
    EXPECT_NE(message_of([&] { tolerance(op, DType::bf16, error, 4); }).find("expected a finite error"),
              std::string::npos);
}

TEST(Verify, TheCpuMayRoundTwiceAndWhereItSaysSoMoreOften) {
  OpSpec op = find_op("silu");
  ASSERT_EQ(op.cpu_extra_ulp, 0);
  EXPECT_DOUBLE_EQ(cpu_tolerance(op, DType::f32, 2), 66 * 0x1p-23 * 2);
  EXPECT_DOUBLE_EQ(cpu_tolerance(op, DType::bf16, 2), (64 * 0x1p-23 + 2 * 0x1p-7) * 2);
  EXPECT_DOUBLE_EQ(cpu_tolerance(op, DType::f16, 2), (64 * 0x1p-23 + 2 * 0x1p-10) * 2);
  EXPECT_DOUBLE_EQ(cpu_tolerance(op, DType::f64, 2), 66 * 0x1p-52 * 2);
  const Precision tf32{DType::f32, F32Math::tf32};
  EXPECT_DOUBLE_EQ(cpu_tolerance(op, tf32, 2), (64 * 0x1p-23 + 2 * 0x1p-10) * 2);
  op.cpu_extra_ulp = 1.5;
  EXPECT_DOUBLE_EQ(cpu_tolerance(op, DType::f32, 2), 66 * 0x1p-23 * 2);
  EXPECT_DOUBLE_EQ(cpu_tolerance(op, DType::bf16, 2), (64 * 0x1p-23 + 3.5 * 0x1p-7) * 2);
  // Far from the half of the largest value that 64 ulp of bf16 were, and never without a reason.
  for (const OpSpec& each : all_ops()) {
    EXPECT_LE(each.cpu_extra_ulp, 6) << each.name;
    EXPECT_EQ(each.cpu_extra_ulp > 0, !each.cpu_extra_reason.empty()) << each.name;
  }
}

}  // namespace
}  // namespace tessera::ops
