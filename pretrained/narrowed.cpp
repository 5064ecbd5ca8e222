#include <algorithm>
#include <cmath>
#include <vector>

#include "pretrained/narrowed_internal.h"

namespace tessera::pretrained {
namespace {

/// The least magnitude that the dtype rounds to infinity; infinite where none does.
double overflow_of(DType dtype) {
  return dtype == DType::f16    ? 65520.0
         : dtype == DType::bf16 ? std::ldexp(2.0 - std::ldexp(1.0, -8), 127)
         : dtype == DType::f32  ? std::ldexp(2.0 - std::ldexp(1.0, -24), 127)
                                : HUGE_VAL;
}

}  // namespace

Tensor narrowed(const Tensor& tensor, DType dtype, const std::string& name) {
  const bool is_wider = is_floating(tensor.dtype()) && overflow_of(tensor.dtype()) > overflow_of(dtype);
  if (!is_wider) return tensor.to(dtype);
  constexpr int64_t kChunk = int64_t{1} << 20;  // elements that are compared on the host at a time
  const Tensor flat = tensor.to(Device::cpu()).packed().reshape({tensor.count()});
  int64_t count = 0;
  double largest = 0;
  for (int64_t begin = 0; begin < flat.count(); begin += kChunk)
    for (const double value :
         flat.slice(0, begin, std::min(flat.count(), begin + kChunk)).to(DType::f64).to_vector<double>()) {
      if (!std::isfinite(value) || std::abs(value) < overflow_of(dtype)) continue;
      count += 1;
      if (std::abs(value) > std::abs(largest)) largest = value;
    }
  check(count == 0, "weights: '", name, "' has ", count, " finite values that ", dtype,
        " would make infinite, such as ", largest, "; ",
        dtype == DType::f16 ? "bf16 or f32 can hold them" : "keep the dtype of the file");
  return tensor.to(dtype);
}

}  // namespace tessera::pretrained
