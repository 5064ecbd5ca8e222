#pragma once

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "nn/module.h"
#include "runtime/philox.h"

namespace tessera::optim {

/// Lets `gradient` arrive at the leaf through a tape, as a backward pass does that has that loss scale (which
/// the gradient is multiplied by already).
inline void arrive(const Tensor& leaf, const Tensor& gradient, const Tensor& loss_scale = {}) {
  Tape tape({.loss_scale = loss_scale});
  Tensor y = leaf.detach().clone();
  tape.record("identity", {&leaf}, {&y}, [](Backward& b) { b.accumulate(0, b.grad()); });
  tape.backward(std::vector{y}, std::vector{gradient.to(y.dtype()).to(y.device())});
}

/// Numbers in (-1, 1), a function of (stream, i) alone.
inline std::vector<double> numbers(uint64_t stream, int64_t count) {
  std::vector<double> values(static_cast<size_t>(count));
  for (size_t i = 0; i < values.size(); ++i)
    values[i] = 2 * double(uniform_half_open(philox(7, stream, i).word[0])) - 1;
  return values;
}

/// The gradient of parameter number `parameter` in a step: numbers of its own.
inline Tensor gradient_of(size_t parameter, int step, const Shape& shape) {
  return Tensor::from(numbers(100 + 10 * uint64_t(step) + parameter, shape.count()), shape);
}

inline Tensor new_parameter(uint64_t stream, const Shape& shape, DType dtype, Device device) {
  Tensor tensor = Tensor::from(numbers(stream, shape.count()), shape).to(dtype).to(device);
  nn::make_parameter(tensor);
  return tensor;
}

inline void expect_near(const Tensor& x, const Tensor& y, double tolerance) {
  const std::vector<double> a = x.detach().to_vector<double>(), b = y.detach().to_vector<double>();
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) ASSERT_NEAR(a[i], b[i], tolerance) << i;
}

/// Runs a test on the CPU and, where there is one, on a GPU.
class OnDevice : public testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    if (std::string(GetParam()) != "cpu" && Device::cuda_count() == 0) GTEST_SKIP() << "no GPU";
  }
  Device device() const { return Device::parse(GetParam()); }
};

}  // namespace tessera::optim
