#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

/// UTF-8 and the classes of characters that tokenizers ask for.

namespace tessera::io::unicode {

struct Range {
  uint32_t first, last;
};
struct CategoryRange {
  uint32_t first, last;
  char category[3];
};

// The tables of unicode_data.cpp, in ascending order.
extern const Range kBertRemoved[], kBertMarks[], kMarks[], kBertPunctuation[], kNumeric[], kWord[], kPlain[];
extern const size_t kBertRemovedCount, kBertMarksCount, kMarksCount, kBertPunctuationCount, kNumericCount,
    kWordCount, kPlainCount;
extern const CategoryRange kNewer[];
extern const size_t kNewerCount;

bool contains(const Range* ranges, size_t count, uint32_t c);

inline bool is_bert_removed(uint32_t c) {
  return contains(kBertRemoved, kBertRemovedCount, c);
}
inline bool is_bert_mark(uint32_t c) {
  return c >= 0x300 && contains(kBertMarks, kBertMarksCount, c);
}
inline bool is_mark(uint32_t c) {
  return c >= 0x300 && contains(kMarks, kMarksCount, c);
}
inline bool is_bert_punctuation(uint32_t c) {
  return contains(kBertPunctuation, kBertPunctuationCount, c);
}
inline bool is_numeric(uint32_t c) {
  return contains(kNumeric, kNumericCount, c);
}
inline bool is_word(uint32_t c) {
  return contains(kWord, kWordCount, c);
}
/// The property White_Space.
bool is_space(uint32_t c);
/// The blocks that BERT takes for Chinese (its tokenization.py, _is_chinese_char).
bool is_chinese(uint32_t c);

/// Bytes of the character that begins with this byte of valid UTF-8.
inline size_t length(char first) {
  const auto c = static_cast<unsigned char>(first);
  return c < 0x80 ? 1 : c < 0xE0 ? 2 : c < 0xF0 ? 3 : 4;
}
/// The character at text[at], which is moved after it. The text is valid UTF-8.
inline uint32_t next(std::string_view text, size_t& at) {
  constexpr uint32_t kFirstBits[5] = {0, 0x7F, 0x1F, 0x0F, 0x07};
  const size_t bytes = length(text[at]);
  uint32_t c = static_cast<unsigned char>(text[at]) & kFirstBits[bytes];
  for (size_t i = 1; i < bytes; ++i) c = c << 6 | (static_cast<unsigned char>(text[at + i]) & 0x3F);
  at += bytes;
  return c;
}
/// The character that ends before text[at], which is moved to its first byte.
uint32_t previous(std::string_view text, size_t& at);
void append(std::string& text, uint32_t c);
/// Characters of valid UTF-8.
size_t count(std::string_view text);

/// Bytes from the start that are valid UTF-8: the whole length if all are.
size_t valid_prefix(std::string_view text);
/// Bytes at the end that begin a character whose other bytes are missing: 0 to 3.
size_t open_end(std::string_view text);
/// Valid UTF-8: each maximal part of an ill-formed sequence becomes U+FFFD (Unicode 15, section 3.9, "U+FFFD
/// Substitution of Maximal Subparts"), as in Python's errors="replace" and in browsers.
std::string repaired(std::string_view text);

// By utf8proc (unicode_utf8proc.cpp); a build without it throws (unicode_absent.cpp).
enum class Form { nfc, nfd, nfkc, nfkd };
std::string normal_form(std::string_view text, Form form);
/// Full lower case of each character by itself: there is no final sigma.
std::string lower_case(std::string_view text);
bool available();
/// Throws, naming `what` needs it, if this build has no utf8proc.
void require_library(const std::string& what);

}  // namespace tessera::io::unicode
