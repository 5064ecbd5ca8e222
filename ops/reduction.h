#pragma once

#include <cstdint>
#include <string_view>

#include "ops/sum_dtype.h"
#include "runtime/error.h"
#include "runtime/text.h"

namespace tessera::ops {

/// How the losses of many elements become one: their mean, their sum, or left as they are.
enum class Reduction : uint8_t { mean, sum, none };

inline constexpr const char* kReductions[] = {"mean", "sum", "none"};

inline const char* name_of(Reduction reduction) {
  return kReductions[size_t(reduction)];
}

/// Throws, naming the choices, for another name.
inline Reduction parse_reduction(std::string_view name) {
  return parse_name<Reduction>("loss: there is no reduction", kReductions, name);
}

}  // namespace tessera::ops
