#pragma once

#include <cstdint>
#include <string_view>

#include "ops/sum_dtype.h"
#include "runtime/error.h"

namespace tessera::ops {

/// How the losses of many elements become one: their mean, their sum, or left as they are.
enum class Reduction : uint8_t { mean, sum, none };

const char* name_of(Reduction reduction);
/// Throws, naming the choices, for another name.
Reduction parse_reduction(std::string_view name);

}  // namespace tessera::ops
