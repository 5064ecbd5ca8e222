#pragma once

#include <charconv>
#include <cstdlib>
#include <string_view>
#include <system_error>

#include "runtime/error.h"

namespace tessera {

/// The seconds that an environment variable gives, 0 for no limit, or `absent`. Throws for anything else. The
/// decimal separator is a point, also in a program that called setlocale().
inline double seconds_of_environment(const char* name, double absent) {
  const char* const set = std::getenv(name);
  const std::string_view text = set ? set : "";
  if (text.empty()) return absent;
  double seconds = -1;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), seconds);
  check(error == std::errc() && end == text.data() + text.size() && seconds >= 0 && seconds < 1e9, name,
        " is \"", text, "\"; expected seconds, 0 for no limit");
  return seconds;
}

}  // namespace tessera
