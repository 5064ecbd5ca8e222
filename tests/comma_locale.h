#pragma once

#include <clocale>
#include <cstdlib>
#include <stdexcept>
#include <string>

#include "tests/folder.h"

namespace tessera {

/// printf writes 1,5 while it lives, as in a German program that calls setlocale(LC_ALL, ""). The locale is
/// made by localedef, since a machine may have none but C.
class CommaLocale {
 public:
  CommaLocale() : former_(std::setlocale(LC_NUMERIC, nullptr)) {
    folder_.put("source",
                "LC_NUMERIC\ndecimal_point \"<U002C>\"\nthousands_sep \"\"\ngrouping -1\nEND LC_NUMERIC\n");
    const std::string make =
        "localedef -c -i " + folder_ / "source" + " " + folder_ / "comma" + " 2>/dev/null";
    [[maybe_unused]] const int warnings = std::system(make.c_str());  // of the categories that it lacks
    ::setenv("LOCPATH", folder_.path().c_str(), 1);
    if (!std::setlocale(LC_NUMERIC, "comma")) throw std::runtime_error("localedef made no locale");
    if (std::to_string(1.5) != "1,500000") throw std::runtime_error("the locale has no comma");
  }
  ~CommaLocale() {
    std::setlocale(LC_NUMERIC, former_.c_str());
    ::unsetenv("LOCPATH");
  }
  CommaLocale(const CommaLocale&) = delete;

 private:
  TemporaryFolder folder_;
  std::string former_;
};

}  // namespace tessera
