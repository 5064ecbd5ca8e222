#pragma once

#include <array>
#include <charconv>
#include <string>

namespace tessera {

/// A number as printf writes it with "%.*f" or, in std::chars_format::scientific, "%.*e", but always with a
/// point: a program that calls setlocale() may have chosen a comma, which printf writes then.
inline std::string decimals(double value, int digits, std::chars_format format = std::chars_format::fixed) {
  std::array<char, 512> text;  // 309 digits of the largest number, and up to 190 after the point
  const auto end = std::to_chars(text.data(), text.data() + text.size(), value, format, digits);
  return std::string(text.data(), end.ptr);
}

}  // namespace tessera
