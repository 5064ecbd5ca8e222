#include "ops/variant.h"

#include <gtest/gtest.h>

#include <thread>

#include "tests/errors.h"

namespace tessera::ops {
namespace {

/// A problem by what each of three variants says of it.
struct Toy {
  const char* lacks[3];
  Estimate estimates[3];
};

std::string describe_problem(const Toy&) {
  return "a toy";
}

template <int kIndex>
Reason toy_lacks(const Toy& toy, const Gpu&) {
  return toy.lacks[kIndex];
}
template <int kIndex>
Estimate toy_estimate(const Toy& toy, const Gpu&) {
  return toy.estimates[kIndex];
}

constexpr const char* kParts[] = {"a", "inner", nullptr};
constexpr Variant<Toy, int()> kVariants[] = {{"c", toy_lacks<0>, toy_estimate<0>, [] { return 0; }, kParts},
                                             {"a", toy_lacks<1>, toy_estimate<1>, [] { return 1; }},
                                             {"b", toy_lacks<2>, toy_estimate<2>, [] { return 2; }}};

const DeviceInfo kInfo{.name = "NVIDIA H200", .major = 9, .minor = 0, .multiprocessors = 132};

int chosen(const Toy& toy) {
  return choose("toy", kVariants, toy, Gpu(kInfo, 132)).launch();
}

TEST(Variant, TheLeastTimeOfThoseThatCanRunTiesToTheEarlier) {
  EXPECT_EQ(chosen({{"", "", ""}, {{3e-6}, {2e-6}, {2e-6}}}), 1);
  EXPECT_EQ(chosen({{"", "more", ""}, {{3e-6}, {2e-6}, {2e-6}}}), 2);
  EXPECT_EQ(chosen({{"", "", ""}, {{3e-6}, {2e-6}, Estimate::preferred()}}), 2);
  EXPECT_EQ(chosen({{"", "", ""}, {Estimate::slower(1e-6), Estimate::otherwise(), {9}}}), 2);
  EXPECT_EQ(chosen({{"", "", ""}, {Estimate::slower(1e-6), Estimate::otherwise(), Estimate::slower()}}), 1);
  EXPECT_EQ(chosen({{"", "x", "x"}, {Estimate::slower(), {1}, {1}}}), 0) << "the only one that can";
  EXPECT_EQ(chosen({{"", "", ""}, {{3e-6, 1e-6}, {2e-6}, {2e-6}}}), 0) << "what is compared decides";
}

TEST(Variant, AForcedNameIsTakenOrThrows) {
  const Toy toy{{"", "", "a larger toy"}, {{1e-6}, {2e-6}, {3e-6}}};
  {
    const ForceVariant force("toy", "a");
    EXPECT_EQ(chosen(toy), 1) << "c is made of a, but a bears the name";
    EXPECT_EQ(chosen({{"", "x", ""}, {{1e-6}, {2e-6}, {3e-6}}}), 0);
  }
  {
    const ForceVariant force("toy", "inner");
    EXPECT_EQ(chosen({{"", "", ""}, {Estimate::slower(), {2e-6}, {3e-6}}}), 0);
  }
  {
    const ForceVariant force("toy", "b");
    EXPECT_EQ(message_of([&] { chosen(toy); }), "toy: variant b needs a larger toy, not a toy");
  }
  {
    const ForceVariant force("toy", "d");
    EXPECT_EQ(message_of([&] { chosen(toy); }),
              "toy: variant d does not exist; expected one of c, a, inner, a, b");
  }
  const ForceVariant other("another", "d");
  EXPECT_EQ(chosen(toy), 0);
  EXPECT_EQ(message_of([] { chosen({{"x", "y", "z"}, {}}); }), "toy: variant c needs x, not a toy");
}

TEST(Variant, ForcingNestsAndIsOfItsThread) {
  EXPECT_EQ(ForceVariant::forced("matmul"), nullptr);
  const ForceVariant outer("matmul", "wgmma");
  {
    const ForceVariant inner("matmul", "cublas"), other("linear", "gemv");
    EXPECT_EQ(*ForceVariant::forced("matmul"), "cublas");
    EXPECT_EQ(*ForceVariant::forced("linear"), "gemv");
    std::thread([] { EXPECT_EQ(ForceVariant::forced("matmul"), nullptr); }).join();
  }
  EXPECT_EQ(*ForceVariant::forced("matmul"), "wgmma");
  EXPECT_EQ(ForceVariant::forced("linear"), nullptr);
}

TEST(Variant, TheLogSaysTheChoiceAndWhatLost) {
  const ChoiceLog log;
  const Toy toy{{"", "", "a larger toy"}, {{1.25e-6}, Estimate::slower(2e-6), {3e-6}}};
  chosen(toy);
  chosen(toy);
  ASSERT_EQ(log.lines().size(), 1u);
  EXPECT_EQ(
      log.lines()[0],
      "toy of a toy: c (1.2 us modelled), not a (2.0 us modelled, but measured to be slower), not b, which "
      "needs a larger toy");
  static const DeviceInfo other{.name = "NVIDIA GB10", .major = 12, .minor = 1, .multiprocessors = 48};
  choose("toy", kVariants, toy, Gpu(other, 48));
  ASSERT_EQ(log.lines().size(), 2u);
  EXPECT_NE(log.lines()[1].find("; costs of an H200, the nearest to NVIDIA GB10"), std::string::npos);
}

TEST(Variant, CostsBelongToTheGpuModel) {
  const auto model = [](const char* name) {
    const DeviceInfo info{.name = name};
    return Gpu(info, 1).model;
  };
  EXPECT_EQ(model("NVIDIA H100 PCIe"), GpuModel::h100);
  EXPECT_EQ(model("NVIDIA H200"), GpuModel::h200);
  EXPECT_EQ(model("NVIDIA A100-SXM4-80GB"), GpuModel::h200);
  const DeviceInfo grace{.name = "NVIDIA GH200 480GB"}, hopper{.name = "NVIDIA H200"};
  EXPECT_FALSE(Gpu(grace, 1).fitted);
  EXPECT_TRUE(Gpu(hopper, 1).fitted);
}

}  // namespace
}  // namespace tessera::ops
