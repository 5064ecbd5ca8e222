#include "io/tokenizer/regex_internal.h"
#include "runtime/error.h"

// In place of regex_pcre2.cpp where the library is missing.

namespace tessera::io {

struct Regex::Compiled {};

Regex::Regex(const std::string& where, const std::string&) {
  fail_at(Site::here(), "tokenizer: ", where,
          ": a pattern needs PCRE2, which this build lacks; install libpcre2-dev and build again");
}

bool Regex::available() {
  return false;
}

bool Regex::find(std::string_view, size_t, Match&, Budget&) const {
  return false;
}

}  // namespace tessera::io
