#include "ops/linear/linear_swiglu.h"

#include <gtest/gtest.h>

#include <cmath>

#include "ops/linear/linear.h"
#include "ops/linear/linear_swiglu_kernels.h"
#include "ops/swiglu/swiglu.h"
#include "ops/variant.h"
#include "runtime/has_cuda.h"
#include "tests/errors.h"
#include "tests/ops/expect.h"
#include "tests/ops/guarded.h"
#include "tests/ops/tensors.h"

namespace tessera::ops {
namespace {

TEST(LinearSwiglu, IsLinearThenSwigluWithTheirGradients) {
  for (const Device device : devices()) {
    const Tensor x = sines({2, 3, 8}, device), weight = sines({10, 8}, device, 2),
                 dy = sines({2, 3, 5}, device, 3);
    EXPECT_EQ(linear_swiglu(x, weight).to_vector<float>(), swiglu(linear(x, weight)).to_vector<float>());
    const auto gradient = [&](auto&& f) {
      return gradient_of(weight.clone(), dy, f).template to_vector<float>();
    };
    EXPECT_EQ(gradient([&](const Tensor& w) { return linear_swiglu(x, w); }),
              gradient([&](const Tensor& w) { return swiglu(linear(x, w)); }));
  }
}

TEST(LinearSwiglu, ErrorsNameWhatIsWrong) {
  const Tensor x = sines({3, 8}, Device::cpu());
  EXPECT_EQ(message_of([&] {
              linear_swiglu(x, sines({5, 8}, Device::cpu()));
            }),
            "linear_swiglu: weight [5, 8] has an odd number of rows; expected [2F, in]: gate and up");
  EXPECT_EQ(message_of([&] {
              linear_swiglu(x, sines({6, 7}, Device::cpu()));
            }),
            "linear_swiglu: weight [6, 7] takes 7 features, but its input has 8; expected [out, 8]");
}

class LinearSwigluCuda : public GuardedCuda<9> {};

/// Variant "epilogue" in its tiles. The operands are quarters, so gate and up are exact.
TEST_F(LinearSwigluCuda, EveryTileIsRightAtEveryEdge) {
  struct Size {
    int64_t rows, in, width;
  };
  for (const Size& size : {Size{1, 8, 8},
                           {3, 24, 64},
                           {129, 40, 72},
                           {300, 72, 264},
                           {128, 64, 128},
                           {2100, 24, 5000}})  // beyond eight waves: clusters
    for (const bool wide : {false, true})
      for (const bool keeps : {false, true}) {
        const Tensor x = quarters({size.rows, size.in}, DType::bf16, 3),
                     weight = eighths({2 * size.width, size.in}, DType::bf16, 1);
        const Tensor gate_up = linear(x.to(DType::f32), weight.to(DType::f32)),
                     wanted = swiglu(gate_up.to(DType::bf16).to(DType::f32));
        const auto filled = [&](int64_t width) {
          return Tensor::full({size.rows, width}, kNan, DType::bf16, gpu());
        };
        const Tensor y = filled(size.width), h = keeps ? filled(2 * size.width) : Tensor();
        if constexpr (kCuda) linear_swiglu_sm90<bf16>(y, h, x.to(gpu()), weight.to(gpu()), wide);
        const std::string what =
            text_of(size.rows, " x ", size.in, " -> ", size.width, wide ? " wide" : "", keeps ? " kept" : "");
        if (keeps) {
          EXPECT_EQ(h.to(kCpu).to(DType::f32).to_vector<float>(),
                    gate_up.to(DType::bf16).to(DType::f32).to_vector<float>())
              << what;
        }
        const auto got = y.to(kCpu).to(DType::f32).to_vector<float>(), right = wanted.to_vector<float>();
        double worst = 0;  // in units of bf16's rounding
        for (size_t i = 0; i < got.size(); ++i) {
          const double off = std::fabs(double(got[i]) - double(right[i]));
          worst =
              std::isnan(off) ? kInf : std::max(worst, off / (0x1p-8 * std::fabs(double(right[i])) + 1e-3));
        }
        EXPECT_LE(worst, 1.25) << what;
      }
}

TEST_F(LinearSwigluCuda, TheEpilogueHasTheGradientsOfTheParts) {
  for (const DType dtype : {DType::bf16, DType::f16}) {
    const Tensor x = normal_on(gpu(), {2, 70, 40}, dtype, 1),
                 weight = normal_on(gpu(), {400, 40}, dtype, 2, 0.3),
                 dy = normal_on(gpu(), {2, 70, 200}, dtype, 3);
    const auto gradients = [&](const char* variant) {
      const ForceVariant force("linear_swiglu", variant);
      const Tensor of_weight =
          gradient_of(weight.clone(), dy, [&](const Tensor& w) { return linear_swiglu(x, w); });
      const Tensor of_x =
          gradient_of(x.clone(), dy, [&](const Tensor& in) { return linear_swiglu(in, weight); });
      auto all = of_weight.to(kCpu).to(DType::f32).to_vector<float>();
      const auto more = of_x.to(kCpu).to(DType::f32).to_vector<float>();
      all.insert(all.end(), more.begin(), more.end());
      return all;
    };
    const auto one = gradients("epilogue"), other = gradients("parts");
    ASSERT_EQ(one.size(), other.size());
    double most = 0, off = 0;
    for (size_t i = 0; i < one.size(); ++i) {
      most = std::max(most, std::fabs(double(other[i])));
      off = std::max(off, std::fabs(double(one[i]) - double(other[i])));
    }
    EXPECT_LE(off, most * (dtype == DType::bf16 ? 0x1p-6 : 0x1p-9));
  }
}

}  // namespace
}  // namespace tessera::ops
