#pragma once

#include <ostream>
#include <string_view>

#include "runtime/device.h"
#include "runtime/f32_math.h"
#include "tensor/dtype.h"
#include "tensor/tensor.h"

namespace tessera {

/// The precision of a model: the dtype of parameters and activations, and the math of f32 GEMMs. In texts
/// (flags, records) TF32 stands among the dtypes: f32, tf32, bf16, f16.
struct Precision {
  DType dtype = DType::f32;
  F32Math math = F32Math::ieee;  // tf32 only with f32

  Precision() = default;
  Precision(DType dtype, F32Math math = F32Math::ieee) : dtype(dtype), math(math) {}  // NOLINT
  friend bool operator==(const Precision&, const Precision&) = default;
};

/// "tf32" for f32 with F32Math::tf32, else the name of the dtype.
const char* name_of(Precision precision);
inline std::ostream& operator<<(std::ostream& out, Precision precision) {
  return out << name_of(precision);
}
/// f64, f32, tf32, bf16 or f16. Throws if the name is another.
Precision parse_precision(std::string_view name);
/// Distance from 1 to the next value of the operands of a GEMM: 2^-10 for tf32, else that of the dtype.
double epsilon(Precision precision);
/// The default of training and benchmarks: bf16 on a GPU that has it (compute capability 8.0
/// or higher), else f32.
Precision default_precision(Device device);

/// The nearest TF32 value, ties away from zero, as the instruction cvt.rna.tf32.f32 rounds: 10 explicit
/// mantissa bits. Infinities and NaN stay.
TESSERA_HD float round_to_tf32(float value) {
  const uint32_t word = std::bit_cast<uint32_t>(value);
  if ((word & 0x7F800000u) == 0x7F800000u) return value;
  return std::bit_cast<float>((word + 0x1000u) & ~0x1FFFu);
}

/// A copy of an f32 tensor on the CPU with every element rounded like that.
Tensor rounded_to_tf32(const Tensor& x);

}  // namespace tessera
