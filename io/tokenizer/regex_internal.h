#pragma once

#include <memory>
#include <string>
#include <string_view>

namespace tessera::io {

/// A regular expression of a tokenizer.json: written for Oniguruma (its Ruby syntax, as the library
/// `tokenizers` uses it), matched by PCRE2 with UTF and Unicode properties.
///
/// The pattern is rewritten so that both see the same characters: \s is the property White_Space, \d is
/// \p{Nd}, \w is Unicode's word, and \p{..} has what Unicode 16 added to it. A class within a class and
/// `&&` are refused.
class Regex {
 public:
  /// Throws, naming `where`, if the pattern is not understood or this build has no PCRE2.
  Regex(const std::string& where, const std::string& pattern);

  /// Whether this build has PCRE2.
  static bool available();

  struct Match {
    size_t begin = 0, end = 0;
  };
  /// The first match at or after `from` in valid UTF-8; false if there is none. Throws if the pattern takes
  /// too many steps. Safe from several threads.
  bool find(std::string_view text, size_t from, Match& match) const;

 private:
  struct Compiled;
  std::shared_ptr<const Compiled> compiled_;
};

}  // namespace tessera::io
