#pragma once

#include <cstddef>
#include <string>
#include <string_view>

#include "runtime/error.h"

namespace tessera {

/// The enumerator whose name `text` is; names[i] is that of Enum(i). Otherwise throws an Error that begins
/// with `what` and gives the choices: parse_name<Kind>("gate: there is no kind", {"none", "top_k"}, "all")
/// says
///   gate: there is no kind "all"; expected none or top_k
template <class Enum, size_t kCount>
Enum parse_name(const char* what, const char* const (&names)[kCount], std::string_view text) {
  std::string choices;
  for (size_t i = 0; i < kCount; ++i) {
    if (text == names[i]) return Enum(i);
    choices += std::string(i == 0 ? "" : i + 1 == kCount ? " or " : ", ") + names[i];
  }
  fail_at(Site::here(), what, " \"", text, "\"; expected ", choices);
}

}  // namespace tessera
