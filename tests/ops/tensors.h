#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "ops/random/random.h"
#include "runtime/philox.h"
#include "tests/tensors.h"

/// Tensors that tests of operators share: by hand, by a formula, and drawn.

namespace tessera::ops {

inline constexpr double kInf = std::numeric_limits<double>::infinity(),
                        kNan = std::numeric_limits<double>::quiet_NaN();
inline constexpr float kInfF = std::numeric_limits<float>::infinity(),
                       kNanF = std::numeric_limits<float>::quiet_NaN();

inline Tensor ones(const Shape& shape, DType dtype = DType::f32, Device device = kCpu) {
  return Tensor::full(shape, 1, dtype, device);
}

inline Tensor labels(const std::vector<int64_t>& values, Device device = kCpu) {
  return Tensor::from(values, {int64_t(values.size())}, device);
}

/// In f64, of rank 1.
inline Tensor row(const std::vector<double>& values) {
  return Tensor::from(values, {int64_t(values.size())});
}

/// first, first + 1, ... in f64.
inline Tensor counting(const Shape& shape, double first = 0) {
  std::vector<double> values(size_t(shape.count()));
  for (size_t i = 0; i < values.size(); ++i) values[i] = first + double(i);
  return Tensor::from(values, shape);
}

/// Multiples of 1/4 from -3/2 to 3/2: products and short sums of them are exact.
inline Tensor quarters(const Shape& shape, DType dtype = DType::f64, int64_t seed = 0) {
  std::vector<double> values(size_t(shape.count()));
  for (size_t i = 0; i < values.size(); ++i) values[i] = double((int64_t(i) * 5 + seed) % 13 - 6) / 4;
  return Tensor::from(values, shape).to(dtype);
}
/// The same halved.
inline Tensor eighths(const Shape& shape, DType dtype, int64_t seed) {
  std::vector<double> values(size_t(shape.count()));
  for (size_t i = 0; i < values.size(); ++i) values[i] = double((int64_t(i) * 5 + seed) % 13 - 6) / 8;
  return Tensor::from(values, shape).to(dtype);
}

/// sin(frequency i + phase) in f32.
inline Tensor sines(const Shape& shape, Device device, double phase = 1, double frequency = 0.7) {
  std::vector<double> values(size_t(shape.count()));
  for (size_t i = 0; i < values.size(); ++i) values[i] = std::sin(frequency * double(i) + phase);
  return Tensor::from(values, shape).to(DType::f32).to(device);
}

/// Uniform in (-1, 1), a function of (stream, i) alone.
inline Tensor uniform(const Shape& shape, DType dtype, uint64_t stream) {
  std::vector<double> values(size_t(shape.count()));
  for (size_t i = 0; i < values.size(); ++i)
    values[i] = 2 * double(uniform_half_open(philox(7, stream, i).word[0])) - 1;
  return Tensor::from(values, shape).to(dtype);
}

/// Normal numbers of deviation 1, drawn in f64 and rounded to the dtype.
inline Tensor normal(const Shape& shape, uint64_t seed, DType dtype = DType::f64, double mean = 0) {
  Rng rng(seed);
  const Tensor x = Tensor::empty(shape, DType::f64, kCpu);
  fill_normal(x, mean, 1, rng);
  return x.to(dtype);
}
/// The same drawn in the dtype itself.
inline Tensor drawn(const Shape& shape, uint64_t seed, DType dtype = DType::f64) {
  Rng rng(seed);
  const Tensor x = Tensor::empty(shape, dtype, kCpu);
  fill_normal(x, 0, 1, rng);
  return x;
}
/// Normal numbers drawn in f32 on the CPU, rounded to the dtype and moved to the device.
inline Tensor normal_on(Device device, const Shape& shape, DType dtype, uint64_t seed, double deviation = 1) {
  Rng rng(seed);
  const Tensor x = Tensor::empty(shape, DType::f32, kCpu);
  fill_normal(x, 0, deviation, rng);
  return x.to(dtype).to(device);
}

/// Equal element by element.
inline void expect_same(const Tensor& a, const Tensor& b, const char* what) {
  EXPECT_EQ(a.to_vector<double>(), b.to_vector<double>()) << what << " " << a.dtype() << a.shape();
}

}  // namespace tessera::ops
