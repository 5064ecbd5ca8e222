#include <utf8proc.h>

#include <cstdlib>
#include <memory>

#include "io/tokenizer/unicode_internal.h"
#include "runtime/error.h"

namespace tessera::io::unicode {
namespace {

struct Pair {
  uint32_t from, to;
};
// Lower case of characters newer than utf8proc 2.8; see tools/unicode_tables on versions.
constexpr Pair kNewLowerCase[] = {{0x1C89, 0x1C8A}, {0xA7CB, 0x264},  {0xA7CC, 0xA7CD}, {0xA7CE, 0xA7CF},
                                  {0xA7D2, 0xA7D3}, {0xA7D4, 0xA7D5}, {0xA7DA, 0xA7DB}, {0xA7DC, 0x19B}};

uint32_t lower_case(uint32_t c) {
  if (c >= 0x10D50 && c <= 0x10D65) return c + 0x20;  // Garay
  if (c >= 0x16EA0 && c <= 0x16EB8) return c + 0x1B;  // Beria Erfe
  for (const Pair& pair : kNewLowerCase)
    if (pair.from == c) return pair.to;
  return uint32_t(utf8proc_tolower(utf8proc_int32_t(c)));
}

/// Appends the normal form of a run without characters of kPlain.
void append_form(std::string& whole, std::string_view run, Form form) {
  if (run.empty()) return;
  const bool compose = form == Form::nfc || form == Form::nfkc,
             compatible = form == Form::nfkc || form == Form::nfkd;
  const auto options = utf8proc_option_t(UTF8PROC_STABLE | (compose ? UTF8PROC_COMPOSE : UTF8PROC_DECOMPOSE) |
                                         (compatible ? UTF8PROC_COMPAT : 0));
  utf8proc_uint8_t* result = nullptr;
  const utf8proc_ssize_t bytes = utf8proc_map(reinterpret_cast<const utf8proc_uint8_t*>(run.data()),
                                              utf8proc_ssize_t(run.size()), &result, options);
  check(bytes >= 0, "tokenizer: utf8proc: ", utf8proc_errmsg(bytes));
  const std::unique_ptr<utf8proc_uint8_t, decltype(&std::free)> owner(result, &std::free);
  whole.append(reinterpret_cast<const char*>(result), size_t(bytes));
}

}  // namespace

std::string normal_form(std::string_view text, Form form) {
  std::string whole;
  whole.reserve(text.size());
  size_t begin = 0;
  bool ascii = true;
  for (size_t at = 0; at < text.size();) {
    const size_t start = at;
    const uint32_t c = next(text, at);
    ascii &= c < 0x80;
    if (c < 0x80 || !contains(kPlain, kPlainCount, c)) continue;
    append_form(whole, text.substr(begin, start - begin), form);
    whole += text.substr(start, at - start);
    begin = at;
  }
  if (ascii) return std::string(text);
  append_form(whole, text.substr(begin), form);
  return whole;
}

std::string lower_case(std::string_view text) {
  std::string whole;
  whole.reserve(text.size());
  for (size_t at = 0; at < text.size();) {
    const uint32_t c = next(text, at);
    if (c < 0x80) {
      whole += char(c >= 'A' && c <= 'Z' ? c + ('a' - 'A') : c);
    } else if (c == 0x130) {
      whole += "i\xCC\x87";  // the one character whose lower case is two: i and a dot above
    } else {
      append(whole, lower_case(c));
    }
  }
  return whole;
}

bool available() {
  return true;
}

void require_library(const std::string&) {}

}  // namespace tessera::io::unicode
