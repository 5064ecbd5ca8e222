#pragma once

#include <string>
#include <vector>

namespace tessera::cli {

/// Cuts a text that comes in pieces before the first stop string; holds back what may be the beginning of
/// one.
class StopTexts {
 public:
  explicit StopTexts(std::vector<std::string> stops) : stops_(std::move(stops)) {}
  /// Text that is certain now; "" once a stop string has been found.
  std::string next(const std::string& piece);
  /// The text that was held back and did not become a stop string.
  std::string finish();
  bool found() const { return found_; }

 private:
  std::vector<std::string> stops_;
  std::string held_;
  bool found_ = false;
};

}  // namespace tessera::cli
