#include "runtime/error.h"

#include <algorithm>
#include <numeric>
#include <vector>

#include "runtime/call_site.h"

namespace tessera {
namespace {

size_t edit_distance(const std::string& a, const std::string& b) {
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

}  // namespace

Error::Error(const std::string& message, const char* file, int line)
    : std::runtime_error(message + CallScope::current().text()),
      file_(file),
      line_(line),
      message_length_(message.size()),
      module_(CallScope::current().module ? CallScope::current().module : "") {}

std::string message_of(const std::exception& error) {
  const auto* const own = dynamic_cast<const Error*>(&error);
  return own ? own->message() : error.what();
}

std::string nearest(const std::string& word, const NameList& names) {
  std::string best;
  size_t best_distance = std::max<size_t>(2, word.size() / 3) + 1;
  std::istringstream lines(names.lines());
  for (std::string name; std::getline(lines, name);) {
    const size_t distance = edit_distance(word, name);
    if (distance < best_distance) best = name, best_distance = distance;
  }
  return best;
}

}  // namespace tessera
