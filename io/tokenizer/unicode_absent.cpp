#include "io/tokenizer/unicode_internal.h"
#include "runtime/error.h"

// In place of unicode_utf8proc.cpp where the library is missing.

namespace tessera::io::unicode {

bool available() {
  return false;
}

void require_library(const std::string& what) {
  fail_at(Site::here(), "tokenizer: ", what,
          " needs utf8proc, which this build lacks; install libutf8proc-dev and build again");
}

std::string normal_form(std::string_view, Form) {
  require_library("a normal form");
  return {};
}

std::string lower_case(std::string_view) {
  require_library("lower case");
  return {};
}

}  // namespace tessera::io::unicode
