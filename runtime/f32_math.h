#pragma once

#include <cstdint>

#include "runtime/override.h"

namespace tessera {

/// How GEMMs and attention multiply f32 operands. Storage, sums and everything else stay f32.
///   ieee  f32 multiply-adds (on a GPU: FMA units)
///   tf32  operands rounded to TF32 (10 explicit mantissa bits, the exponent of f32), products summed in f32:
///         on a GPU by tensor cores. The CPU rounds the operands alike and multiplies in f32, so that it
///         shows what TF32 does to a result. f64, bf16 and f16 operands are unaffected.
enum class F32Math : uint8_t { ieee, tf32 };

constexpr const char* name_of(F32Math math) {  // "ieee", "tf32"
  return math == F32Math::tf32 ? "tf32" : "ieee";
}

/// Sets f32_math() of this thread for the lifetime of the scope; scopes nest. A tape remembers the value with
/// each operator that it records and restores it for that operator's backward function, so backward() may
/// run outside the scope.
class F32MathScope {
 public:
  explicit F32MathScope(F32Math math) : scope_(current_, math) {}

 private:
  friend F32Math f32_math();
  static inline constinit thread_local F32Math current_ = F32Math::ieee;
  Override<F32Math> scope_;
};

/// The mode of this thread's operators: ieee unless an F32MathScope lives.
inline F32Math f32_math() {
  return F32MathScope::current_;
}

}  // namespace tessera
