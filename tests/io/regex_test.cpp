#include "io/tokenizer/regex_internal.h"

#include <gtest/gtest.h>

#include <random>
#include <regex>

// A search looks at the text a window at a time. What it finds must not depend on that: the matches are
// compared with those of std::regex, which sees all of the text.

namespace tessera::io {
namespace {

using Spans = std::vector<std::pair<size_t, size_t>>;

Spans found_by_us(const Regex& regex, const std::string& text) {
  Spans spans;
  Regex::Budget budget(1 << 24);  // some of the patterns take a time that grows with the square of the text
  Regex::Match match;
  for (size_t from = 0; from <= text.size() && regex.find(text, from, match, budget);
       from = match.end + (match.begin == match.end))
    spans.emplace_back(match.begin, match.end);
  return spans;
}

Spans found_by_the_library(const std::string& pattern, const std::string& text) {
  Spans spans;
  const std::regex regex(pattern);
  for (std::sregex_iterator at(text.begin(), text.end(), regex), end; at != end; ++at)
    spans.emplace_back(size_t(at->position()), size_t(at->position() + at->length()));
  return spans;
}

TEST(Regex, MatchesDoNotDependOnTheWindow) {
  if (!Regex::available()) GTEST_SKIP() << "skipped: no PCRE2";
  std::mt19937 random(11);
  for (int round = 0; round < 60; ++round) {
    // Runs whose lengths lie around the sizes of windows.
    std::string text;
    while (text.size() < 3000) {
      constexpr size_t kLengths[] = {1, 2, 3, 5, 40, 254, 255, 256, 257, 511, 512, 513};
      constexpr char kLetters[] = "ab1 \n'!";
      text += std::string(kLengths[random() % (round % 3 ? 12 : 5)], kLetters[random() % 7]);
      text += round % 2 ? "ab" : "";
    }
    for (const char* pattern : {R"('a|'b| ?[a-z]+| ?[0-9]+| ?[^\sa-z0-9]+|\s+(?!\S)|\s+)", "[ab]*1|[ab]",
                                "(?:ab|a)+(?![a-z])|[a-z]| +", "b(?=a)|1", "[^ab]+", "!{3,400}", "a*?1|b"})
      EXPECT_EQ(found_by_us(Regex("test", pattern), text), found_by_the_library(pattern, text)) << pattern;
  }
}

TEST(Regex, EndsOfLinesAndTextAreThoseOfTheText) {
  if (!Regex::available()) GTEST_SKIP() << "skipped: no PCRE2";
  const std::string text = std::string(700, 'a') + "\n" + std::string(300, 'b');
  EXPECT_EQ(found_by_us(Regex("test", "$"), text), (Spans{{700, 700}, {1001, 1001}}));
  EXPECT_EQ(found_by_us(Regex("test", R"(\z)"), text), (Spans{{1001, 1001}}));
  EXPECT_EQ(found_by_us(Regex("test", R"(\b)"), text), (Spans{{0, 0}, {700, 700}, {701, 701}, {1001, 1001}}));
  EXPECT_EQ(found_by_us(Regex("test", "a$|b$"), text), (Spans{{699, 700}, {1000, 1001}}));
  EXPECT_EQ(found_by_us(Regex("test", "(?<=a{255})a"), text).size(), 445u);
  // Characters of several bytes are not cut.
  std::string wide;
  for (int i = 0; i < 300; ++i) wide += i % 100 ? "\xE4\xB8\xAD" : "x";
  EXPECT_EQ(found_by_us(Regex("test", "[^x]+"), wide), (Spans{{1, 298}, {299, 596}, {597, 894}}));
}

}  // namespace
}  // namespace tessera::io
