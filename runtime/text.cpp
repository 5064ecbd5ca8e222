#include "runtime/text.h"

#include <array>
#include <cstdlib>
#include <numeric>
#include <system_error>
#include <vector>

#include "runtime/error.h"

namespace tessera {

std::string decimals(double value, int digits, std::chars_format format) {
  std::array<char, 512> text;  // 309 digits of the largest number, and up to 190 after the point
  const auto end = std::to_chars(text.data(), text.data() + text.size(), value, format, digits);
  return std::string(text.data(), end.ptr);
}

std::string format_bytes(size_t bytes) {
  const char* const units[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  double value = double(bytes);
  size_t unit = 0;
  while (value >= 1024 && unit < 6) value /= 1024, ++unit;
  return decimals(value, unit == 0 || value >= 100 ? 0 : 2) + " " + units[unit];
}

double seconds_of_environment(const char* name, double absent) {
  const char* const set = std::getenv(name);
  const std::string_view text = set ? set : "";
  if (text.empty()) return absent;
  double seconds = -1;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), seconds);
  check(error == std::errc() && end == text.data() + text.size() && seconds >= 0 && seconds < 1e9, name,
        " is \"", text, "\"; expected seconds, 0 for no limit");
  return seconds;
}

std::string shown(const std::string& name) {
  constexpr size_t kMost = 100;
  std::string safe = name.substr(0, kMost);
  for (char& c : safe)
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7F) c = '?';
  return name.size() > kMost ? safe + "..." : safe;
}

size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), size_t{0});
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = row[0];
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t substitute = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = row[j];
      row[j] = std::min({row[j] + 1, row[j - 1] + 1, substitute});
    }
  }
  return row.back();
}

size_t parse_index(const char* what, std::span<const char* const> names, std::string_view text) {
  std::string choices;
  for (size_t i = 0; i < names.size(); ++i) {
    if (text == names[i]) return i;
    choices += std::string(i == 0 ? "" : i + 1 == names.size() ? " or " : ", ") + names[i];
  }
  fail_at(Site::here(), what, " \"", text, "\"; expected ", choices, did_you_mean(text, names));
}

}  // namespace tessera
