#include "io/tokenizer/regex_internal.h"

#include <gtest/gtest.h>

#include "io/tokenizer/normalizer_internal.h"

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

std::string marked(const std::string& pattern, const std::string& text) {
  const nlohmann::json regex{{"Regex", pattern}};
  return replaced(text, Pattern(Settings(regex, "test")), "#");
}

// What the normalizer Replace of the library tokenizers 0.23.3 (Oniguruma) makes of the same.
TEST(Regex, PatternsMeanWhatTheyMeanToOniguruma) {
  if (!Regex::available()) GTEST_SKIP() << "skipped: no PCRE2";
  // The name of a script is the property Script: punctuation that scripts share is not among them.
  EXPECT_EQ(marked(R"(\p{Han}+)", "你好、世界。一々〃"), "#、#。#〃");
  EXPECT_EQ(marked(R"([\p{Hiragana}\p{Katakana}]+)", "ひらー、カナ。"), "#ー、#。");
  EXPECT_EQ(marked(R"([\P{Han}]+)", "你、好"), "你#好");
  EXPECT_EQ(marked(R"(\p{Latin}+)", "ab\u0363c \u202f"), "#\u0363# \u202f");
  // Words have marks, and outside of a class the superscripts and fractions of Latin-1.
  EXPECT_EQ(marked(R"(\w+)", "x² ½a ①"), "# # ①");
  EXPECT_EQ(marked(R"([\w-]+)", "x² ½a"), "#² ½#");
  EXPECT_EQ(marked(R"(\bthe\b)", "the, the\u0301 ½the the"), "#, the\u0301 ½the #");
  EXPECT_EQ(marked(R"(\B)", "a\u0301b"), "a#\u0301#b");
  EXPECT_EQ(marked(R"(\H+)", "xyz fab"), "#fab");
  EXPECT_EQ(marked(R"(\v)", "a\vb\nc\u2028"), "a#b\nc\u2028");
  EXPECT_EQ(marked("a{,2}b", "b ab aaab"), "# # a#");
  EXPECT_EQ(marked("x{}|y{,}", "x{} y{,}"), "# #");
  EXPECT_EQ(marked(R"(\p{Mn})", "a\u0897b"), "a#b");
  EXPECT_EQ(marked("(?:(?i)a|b)(?i)c", "ac BC bC d"), "# # # d");
  EXPECT_EQ(marked("[[:punct:]]+", "a,+b€"), "a#b#");
  EXPECT_EQ(marked("[[:space:][:digit:]]+", "a \u00a01\u0663b\u180e"), "a#b\u180e");
  EXPECT_EQ(marked("[^[:^space:]]", "a b"), "a#b");
  EXPECT_EQ(marked("[[:xdigit:]]+", "xyzfab"), "xyz#");
  EXPECT_EQ(marked("[[:word:]]+", "a\u0301_½"), "#½");
}

TEST(Regex, AnEmptyMatchAfterAnotherDoesNotCount) {
  if (!Regex::available()) GTEST_SKIP() << "skipped: no PCRE2";
  EXPECT_EQ(marked("a|", "ab"), "#b#");
  EXPECT_EQ(marked("a*", "baab"), "#b#b#");
  EXPECT_EQ(marked("", "ab"), "#a#b#");
  EXPECT_EQ(marked("$", "a\n"), "a#\n#");
}

}  // namespace
}  // namespace tessera::io
