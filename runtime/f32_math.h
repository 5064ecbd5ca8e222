#pragma once

#include <cstdint>

namespace tessera {

/// How GEMMs and attention multiply f32 operands. Storage, sums and everything else stay f32.
///   ieee  f32 multiply-adds (on a GPU: FMA units)
///   tf32  operands rounded to TF32 (10 explicit mantissa bits, the exponent of f32), products summed in f32:
///         on a GPU by tensor cores. The CPU rounds the operands alike and multiplies in f32, so that it
///         shows what TF32 does to a result. f64, bf16 and f16 operands are unaffected.
enum class F32Math : uint8_t { ieee, tf32 };

const char* name_of(F32Math math);  // "ieee", "tf32"

/// The mode of this thread's operators: ieee unless an F32MathScope lives.
F32Math f32_math();

/// Sets f32_math() of this thread for the lifetime of the scope; scopes nest. A tape remembers the value with
/// each operator that it records and restores it for that operator's backward function, so backward() may
/// run outside the scope.
class F32MathScope {
 public:
  explicit F32MathScope(F32Math math);
  ~F32MathScope();
  F32MathScope(const F32MathScope&) = delete;

 private:
  F32Math outer_;
};

}  // namespace tessera
