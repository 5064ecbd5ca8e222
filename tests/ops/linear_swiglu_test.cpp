#include "ops/linear/linear_swiglu.h"

#include <gtest/gtest.h>

#include "ops/linear/linear.h"
#include "ops/swiglu/swiglu.h"
#include "tests/errors.h"
#include "tests/ops/expect.h"
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

}  // namespace
}  // namespace tessera::ops
