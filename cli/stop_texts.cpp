#include "cli/stop_texts.h"

#include <algorithm>
#include <string_view>
#include <utility>

namespace tessera::cli {

std::string StopTexts::next(const std::string& piece) {
  if (found_) return "";
  held_ += piece;
  size_t end = std::string::npos;
  for (const std::string& stop : stops_) end = std::min(end, held_.find(stop));
  if (end != std::string::npos) {
    found_ = true;
    return held_.substr(0, end);
  }
  size_t kept = 0;  // the longest end of the text that a stop text begins with
  for (const std::string& stop : stops_)
    for (size_t length = std::min(held_.size(), stop.size() - 1); length > kept; --length)
      if (held_.ends_with(std::string_view(stop).substr(0, length))) kept = length;
  const std::string certain = held_.substr(0, held_.size() - kept);
  held_.erase(0, certain.size());
  return certain;
}

std::string StopTexts::finish() {
  return found_ ? std::string() : std::exchange(held_, {});
}

}  // namespace tessera::cli
