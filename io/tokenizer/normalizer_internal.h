#pragma once

#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "io/tokenizer/regex_internal.h"
#include "io/tokenizer/settings_internal.h"
#include "io/tokenizer/unicode_internal.h"

namespace tessera::io {

/// Text or pattern, as "Replace" and "Split" have it.
class Pattern {
 public:
  explicit Pattern(const Settings& settings);
  bool find(std::string_view text, size_t from, Regex::Match& match, Regex::Budget& budget) const;

 private:
  std::string text_;
  std::optional<Regex> regex_;
};

/// The normalizer of a tokenizer.json: steps that each make a text from a text (valid UTF-8).
///
/// BertNormalizer, Lowercase, NFC, NFD, NFKC, NFKD, StripAccents, Strip, Prepend, Replace, Sequence.
class Normalizer {
 public:
  Normalizer() = default;
  explicit Normalizer(const Settings& settings) { add(settings); }
  bool empty() const { return steps_.empty(); }
  std::string operator()(std::string text) const;

 private:
  struct Bert {
    bool clean, chinese, strip, lower;
  };
  struct Lowercase {};
  struct StripAccents {};
  struct Strip {
    bool left, right;
  };
  struct Prepend {
    std::string text;
  };
  struct Replace {
    Pattern pattern;
    std::string text;
  };
  using Step = std::variant<Bert, Lowercase, unicode::Form, StripAccents, Strip, Prepend, Replace>;
  void add(const Settings& settings);
  static std::string apply(const Bert& bert, std::string_view text);
  static std::string apply(const Replace& replace, std::string_view text);
  std::vector<Step> steps_;
};

/// `text` with every match replaced.
std::string replaced(std::string_view text, const Pattern& pattern, std::string_view by);

}  // namespace tessera::io
