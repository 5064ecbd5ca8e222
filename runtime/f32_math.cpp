#include "runtime/f32_math.h"

#include <utility>

namespace tessera {
namespace {

thread_local F32Math t_math = F32Math::ieee;

}  // namespace

const char* name_of(F32Math math) {
  return math == F32Math::tf32 ? "tf32" : "ieee";
}

F32Math f32_math() {
  return t_math;
}

F32MathScope::F32MathScope(F32Math math) : outer_(std::exchange(t_math, math)) {}
F32MathScope::~F32MathScope() {
  t_math = outer_;
}

}  // namespace tessera
