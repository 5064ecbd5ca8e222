#include "nn/narrowed.h"

#include <algorithm>
#include <cmath>

#include "ops/pointwise/pointwise.h"
#include "ops/reduce/reduce.h"

namespace tessera::nn {
namespace {

/// The least magnitude that the dtype rounds to infinity; infinite where none does.
double overflow_of(DType dtype) {
  return dtype == DType::f16    ? 65520.0
         : dtype == DType::bf16 ? std::ldexp(2.0 - std::ldexp(1.0, -8), 127)
         : dtype == DType::f32  ? std::ldexp(2.0 - std::ldexp(1.0, -24), 127)
                                : HUGE_VAL;
}

bool may_overflow(DType from, DType to) {
  return is_floating(from) && overflow_of(from) > overflow_of(to);
}

/// Throws if `tensor` has finite values that `dtype` makes infinite.
void check_overflow(const Tensor& tensor, DType dtype, const std::string& name) {
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
}

/// Only where rounding left something infinite are the values looked at one by one: saving and loading large
/// models would take minutes more.
void check_rounded(const Tensor& rounded, const Tensor& from, const std::string& name) {
  if (!may_overflow(from.dtype(), rounded.dtype())) return;
  // 0 times an infinity or a NaN is a NaN.
  if (ops::sum(ops::scale(rounded, 0)).item() != 0) check_overflow(from, rounded.dtype(), name);
}

}  // namespace

Tensor narrowed(const Tensor& tensor, DType dtype, const std::string& name) {
  const Tensor rounded = tensor.to(dtype);
  check_rounded(rounded, tensor, name);
  return rounded;
}

void copy_narrowed(const Tensor& to, const Tensor& from, const std::string& name) {
  to.copy_from(from);
  check_rounded(to, from, name);
}

}  // namespace tessera::nn
