#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "tensor/tensor.h"

/// What tests read of tensors, and how they compare them.

namespace tessera {

inline const Device kCpu = Device::cpu();

inline std::vector<double> values(const Tensor& x) {
  return x.to_vector<double>();
}

/// The same; none if there is no tensor, for gradients that may not have arrived.
inline std::vector<double> values_if_defined(const Tensor& x) {
  return x.defined() ? values(x) : std::vector<double>();
}

/// The largest |a[i] - b[i]|; infinity if the sizes differ, or if one of them alone is not a number
/// somewhere.
inline double largest_difference(const Tensor& a, const Tensor& b) {
  const auto x = values(a), y = values(b);
  double most = x.size() == y.size() ? 0 : INFINITY;
  for (size_t i = 0; i < std::min(x.size(), y.size()); ++i) {
    if (std::isnan(x[i]) != std::isnan(y[i])) return INFINITY;
    if (!std::isnan(x[i]) && x[i] != y[i]) most = std::max(most, std::abs(x[i] - y[i]));
  }
  return most;
}

/// Whether both have the same shape, dtype and bits; on the CPU.
inline bool same_bits(const Tensor& a, const Tensor& b) {
  const Tensor x = a.detach().packed(), y = b.detach().packed();
  return x.shape() == y.shape() && x.dtype() == y.dtype() &&
         (x.bytes() == 0 || std::memcmp(x.raw(), y.raw(), x.bytes()) == 0);
}

}  // namespace tessera
