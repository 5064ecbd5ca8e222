#include <algorithm>
#include <cstring>

#include "io/tokenizer/unicode_internal.h"

namespace tessera::io::unicode {
namespace {

unsigned byte_at(std::string_view text, size_t at) {
  return static_cast<unsigned char>(text[at]);
}

/// Bytes of the character at `at`; of an ill-formed sequence its maximal subpart, with `good` false (Unicode
/// 15, table 3-7).
size_t sequence(std::string_view text, size_t at, bool& good) {
  const unsigned first = byte_at(text, at);
  good = first < 0x80;
  if (good || first < 0xC2 || first > 0xF4) return 1;
  const size_t bytes = length(text[at]);
  unsigned low = first == 0xE0 ? 0xA0 : first == 0xF0 ? 0x90 : 0x80;
  unsigned high = first == 0xED ? 0x9F : first == 0xF4 ? 0x8F : 0xBF;
  for (size_t i = 1; i < bytes; ++i) {
    if (at + i >= text.size() || byte_at(text, at + i) < low || byte_at(text, at + i) > high) return i;
    low = 0x80, high = 0xBF;
  }
  good = true;
  return bytes;
}

/// Bytes from `at` that are ASCII, counted eight at a time.
size_t ascii_run(std::string_view text, size_t at) {
  const size_t begin = at;
  for (uint64_t word; at + sizeof word <= text.size(); at += sizeof word) {
    std::memcpy(&word, text.data() + at, sizeof word);
    if (word & 0x8080808080808080) break;
  }
  while (at < text.size() && byte_at(text, at) < 0x80) ++at;
  return at - begin;
}

}  // namespace

bool contains(const Range* ranges, size_t count, uint32_t c) {
  const Range* const found = std::lower_bound(ranges, ranges + count, c,
                                              [](const Range& range, uint32_t x) { return range.last < x; });
  return found != ranges + count && found->first <= c;
}

bool is_space(uint32_t c) {
  if (c < 0x80) return c == ' ' || (c >= '\t' && c <= '\r');
  return c == 0x85 || c == 0xA0 || c == 0x1680 || (c >= 0x2000 && c <= 0x200A) || c == 0x2028 ||
         c == 0x2029 || c == 0x202F || c == 0x205F || c == 0x3000;
}

bool is_chinese(uint32_t c) {
  // The published list ends one block at U+2B81F and begins the next at U+2B920: a slip that is now the rule.
  constexpr Range kBlocks[] = {{0x3400, 0x4DBF},   {0x4E00, 0x9FFF},   {0xF900, 0xFAFF},  {0x20000, 0x2A6DF},
                               {0x2A700, 0x2B81F}, {0x2B920, 0x2CEAF}, {0x2F800, 0x2FA1F}};
  return contains(kBlocks, std::size(kBlocks), c);
}

uint32_t previous(std::string_view text, size_t& at) {
  do --at;
  while ((byte_at(text, at) & 0xC0) == 0x80);
  size_t begin = at;
  return next(text, begin);
}

void append(std::string& text, uint32_t c) {
  if (c < 0x80) {
    text += char(c);
  } else if (c < 0x800) {
    text += char(0xC0 | c >> 6);
    text += char(0x80 | (c & 0x3F));
  } else if (c < 0x10000) {
    text += char(0xE0 | c >> 12);
    text += char(0x80 | (c >> 6 & 0x3F));
    text += char(0x80 | (c & 0x3F));
  } else {
    text += char(0xF0 | c >> 18);
    text += char(0x80 | (c >> 12 & 0x3F));
    text += char(0x80 | (c >> 6 & 0x3F));
    text += char(0x80 | (c & 0x3F));
  }
}

size_t count(std::string_view text) {
  return size_t(std::count_if(text.begin(), text.end(), [](char c) { return (c & 0xC0) != 0x80; }));
}

size_t valid_prefix(std::string_view text) {
  for (size_t at = 0;;) {
    at += ascii_run(text, at);
    if (at == text.size()) return at;
    bool good = false;
    const size_t bytes = sequence(text, at, good);
    if (!good) return at;
    at += bytes;
  }
}

size_t open_end(std::string_view text) {
  for (size_t bytes = 1; bytes <= 3 && bytes <= text.size(); ++bytes) {
    const size_t at = text.size() - bytes;
    if ((byte_at(text, at) & 0xC0) == 0x80) continue;
    bool good = false;
    const bool is_start = byte_at(text, at) >= 0xC2 && byte_at(text, at) <= 0xF4;
    return is_start && sequence(text, at, good) == bytes && !good ? bytes : 0;
  }
  return 0;
}

std::string repaired(std::string_view text) {
  std::string whole;
  whole.reserve(text.size());
  for (size_t at = 0; at < text.size();) {
    const size_t good_bytes = valid_prefix(text.substr(at));
    whole += text.substr(at, good_bytes);
    at += good_bytes;
    if (at == text.size()) break;
    bool good = false;
    at += sequence(text, at, good);
    whole += "\xEF\xBF\xBD";
  }
  return whole;
}

}  // namespace tessera::io::unicode
