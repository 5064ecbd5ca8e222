#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

namespace tessera::io {

/// A regular expression of a tokenizer.json: written for Oniguruma (its Ruby syntax, as the library
/// `tokenizers` uses it), matched by PCRE2 with UTF and Unicode properties.
///
/// The pattern is rewritten so that both see the same characters: \s is the property White_Space, \d is
/// \p{Nd}, \w and \b know Unicode's words, \p{Han} is the property Script, and \p{..} of a general category
/// has what Unicode 16 added to it. What cannot be rewritten is refused: a class within a class, `&&`, \G,
/// \X, [:alpha:], {3}?, flags within an alternative. Case folding is by single characters: (?i)ss is not ß.
class Regex {
 public:
  /// Throws, naming `where`, if the pattern is not understood or this build has no PCRE2.
  Regex(const std::string& where, const std::string& pattern);

  /// Whether this build has PCRE2.
  static bool available();

  struct Match {
    size_t begin = 0, end = 0;
  };
  /// Limit on the cost of all searches in one text together. A start position is free as long as it takes few
  /// steps and looks at few bytes; beyond that it is charged for both. So the time is linear in the text's
  /// length, whatever the pattern; a limit per start position would not bound it, since there are as many of
  /// those as bytes.
  class Budget {
   public:
    explicit Budget(size_t bytes) : most_(kPerByte * bytes + kFirst), left_(most_) {}
    /// False if less than `steps` was left.
    bool take(uint64_t steps) {
      if (steps > left_) return false;
      left_ -= steps;
      return true;
    }
    uint64_t most() const { return most_; }

   private:
    /// A run of blanks that is as long as the text, the worst honest case, takes some 6 steps per byte. 64
    /// are half a second for 1 MB, at about 8 ns each.
    static constexpr uint64_t kPerByte = 64, kFirst = 1 << 16;
    uint64_t most_, left_;
  };
  /// The first match at or after `from` in valid UTF-8; false if there is none. Throws if the budget does not
  /// suffice. Safe from several threads, with a budget each.
  bool find(std::string_view text, size_t from, Match& match, Budget& budget) const;

 private:
  struct Compiled;
  std::shared_ptr<const Compiled> compiled_;
};

}  // namespace tessera::io
