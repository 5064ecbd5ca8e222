#pragma once

#include <string>
#include <vector>

namespace tessera::cli {

/// Ends a text that comes in pieces before the first place where one of some texts stands; holds back what
/// may be the beginning of one.
class StopTexts {
 public:
  explicit StopTexts(std::vector<std::string> stops) : stops_(std::move(stops)) {}
  /// What is certain now; "" once a stop text has been found.
  std::string next(const std::string& piece);
  /// What was held back and has not become a stop text.
  std::string finish();
  bool found() const { return found_; }

 private:
  std::vector<std::string> stops_;
  std::string held_;
  bool found_ = false;
};

}  // namespace tessera::cli
