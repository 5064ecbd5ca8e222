#pragma once

#include <cstdint>
#include <string_view>

#include "ops/sum_dtype.h"
#include "runtime/error.h"

namespace tessera::ops {

/// How the losses of many elements become one: their mean, their sum, or left as they are.
enum class Reduction : uint8_t { mean, sum, none };

inline const char* name_of(Reduction reduction) {
  constexpr const char* kNames[] = {"mean", "sum", "none"};
  return kNames[size_t(reduction)];
}

/// Throws on anything but "mean", "sum" and "none".
inline Reduction parse_reduction(std::string_view name) {
  for (const Reduction reduction : {Reduction::mean, Reduction::sum, Reduction::none})
    if (name == name_of(reduction)) return reduction;
  fail_at(Site::here(), "reduction \"", name, "\": expected mean, sum or none");
}

}  // namespace tessera::ops
