#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include <cstdio>

#include "io/safetensors_internal.h"
#include "io/tokenizer/regex_internal.h"
#include "io/tokenizer/unicode_internal.h"
#include "runtime/error.h"

namespace tessera::io {

/// Named, as Regex::Compiled has members of it.
namespace regex_internal {

template <auto free>
struct Free {
  void operator()(auto* thing) const { free(thing); }
};
template <class T, auto free>
using Owned = std::unique_ptr<T, Free<free>>;

}  // namespace regex_internal

namespace {

using regex_internal::Owned;

/// What a start position may take free of charge: bytes that it looks at (words are shorter), and steps in
/// the sense of PCRE2's match limit, which starts again at each start position.
constexpr size_t kFreeBytes = 256;
constexpr uint32_t kFreeSteps = 256;
constexpr size_t kFirstStack = 32 << 10, kMostStack = 8 << 20;
constexpr uint32_t kLargestPattern = 64 << 10;

/// White_Space, as the inside of a class. PCRE2's own \s has U+180E too.
constexpr const char* kSpaces =
    R"(\x{9}-\x{d}\x{20}\x{85}\x{a0}\x{1680}\x{2000}-\x{200a}\x{2028}\x{2029}\x{202f}\x{205f}\x{3000})";
constexpr const char* kNoSpaces =
    R"(\x{0}-\x{8}\x{e}-\x{1f}\x{21}-\x{84}\x{86}-\x{9f}\x{a1}-\x{167f}\x{1681}-\x{1fff}\x{200b}-\x{2027})"
    R"(\x{202a}-\x{202e}\x{2030}-\x{205e}\x{2060}-\x{2fff}\x{3001}-\x{10ffff})";

/// Whether this PCRE2 knows `property`, the inside of \p{}.
bool is_property(const std::string& property) {
  const std::string pattern = "\\p{" + property + "}";
  int error = 0;
  PCRE2_SIZE place = 0;
  return Owned<pcre2_code, pcre2_code_free>(pcre2_compile(reinterpret_cast<PCRE2_SPTR>(pattern.data()),
                                                          pattern.size(), PCRE2_UTF, &error, &place,
                                                          nullptr)) != nullptr;
}

/// The inside of \p{} that means the same in PCRE2. The name of a script is the property Script in Oniguruma.
/// In PCRE2 since 10.40 it is Script_Extensions, of which Han has the ideographic comma and full stop, too.
std::string property(const std::string& name) {
  const std::string script = "sc:" + name;
  return name.size() > 2 && is_property(script) ? script : name;
}

/// \p{..} as the inside of a class, with what is newer than PCRE2's tables.
std::string category(const std::string& name) {
  std::string items = "\\p{" + property(name) + "}";
  const bool known = !name.empty() && name.size() <= 2 && name.find_first_not_of("LMNPSudtlocemknsif") > 1;
  for (size_t i = 0; known && i < unicode::kNewerCount; ++i) {
    const unicode::CategoryRange& range = unicode::kNewer[i];
    if (std::string_view(range.category).substr(0, name.size()) != name) continue;
    char text[32];
    std::snprintf(text, sizeof text, "\\x{%x}-\\x{%x}", range.first, range.last);
    items += text;
  }
  return items;
}

/// The inside of a class for \w. Oniguruma adds the superscripts and fractions of Latin-1 outside of classes.
std::string word_items(bool in_class) {
  // The last four ranges are circled and squared letters: alphabetic, though no letters.
  return category("L") + category("M") + category("Nd") + category("Nl") + category("Pc") +
         (in_class ? "" : R"(\x{b2}\x{b3}\x{b9}\x{bc}-\x{be})") +
         R"(\x{24b6}-\x{24e9}\x{1f130}-\x{1f149}\x{1f150}-\x{1f169}\x{1f170}-\x{1f189})";
}

/// Rewrites an Oniguruma pattern for PCRE2; see regex_internal.h.
class Translator {
 public:
  Translator(const std::string& where, const std::string& from) : where_(where), from_(from) {}

  std::string run() {
    while (at_ < from_.size()) {
      const char c = from_[at_];
      const bool at_start = c == '(' || c == '|';  // of an alternative
      if (c == '\\')
        escape(), at_start_ = false;
      else if (in_class_)
        class_character(c);
      else
        plain(c), at_start_ = at_start;
    }
    return std::move(to_);
  }

 private:
  [[noreturn]] void refuse(const std::string& what) const {
    fail_at(Site::here(), "tokenizer: ", where_, ": the pattern \"", shown(from_), "\" has ", what,
            " at byte ", at_, ", which is not supported");
  }

  void plain(char c) {
    if (c == '[') {
      in_class_ = true;
      to_ += c, ++at_;
      if (at_ < from_.size() && from_[at_] == '^') to_ += from_[at_++];
      if (at_ < from_.size() && from_[at_] == ']') refuse("an empty class");
    } else if (c == '{') {
      // After an interval, Oniguruma takes + for another repetition, PCRE2 for "give nothing back".
      const size_t end = from_.find_first_not_of("0123456789,", at_ + 1);
      const bool is_interval = end != std::string::npos && from_[end] == '}' && end > at_ + 1;
      const char after = is_interval && end + 1 < from_.size() ? from_[end + 1] : ' ';
      if (after == '+') refuse("a + after an interval");
      // There, "these n or none"; in PCRE2, n of them.
      if (after == '?' && from_.find(',', at_) > end) refuse("a ? after the interval {n}");
      to_ += c, ++at_;
      if (is_interval && from_[at_] == ',' && from_[at_ + 1] != '}') to_ += '0';  // {,n}: plain text in PCRE2
    } else if (c == '(' && from_.compare(at_, 2, "(?") == 0) {
      // Flags: m means another thing in each of the two.
      const size_t end = from_.find_first_not_of("imxs-", at_ + 2);
      const size_t flags = (end == std::string::npos ? from_.size() : end) - at_ - 2;
      if (from_.substr(at_ + 2, flags).find_first_of("ms") != std::string::npos) refuse("the flag m or s");
      // a(?i)b|c is a(?i:b|c) there and a(?i:b)|(?i:c) in PCRE2.
      if (flags > 0 && end != std::string::npos && from_[end] == ')' && !at_start_ &&
          from_.find('|', end) != std::string::npos)
        refuse("flags within an alternative");
      to_ += "(?", at_ += 2;
      if (at_ < from_.size() && from_[at_] == ':') to_ += ':', ++at_;
    } else {
      to_ += c, ++at_;
    }
  }

  void class_character(char c) {
    if (c == '[' && from_.compare(at_, 2, "[:") != 0) refuse("a class within a class");
    if (from_.compare(at_, 2, "&&") == 0) refuse("an intersection of classes");
    if (c == '[') {
      const size_t end = from_.find(":]", at_);
      if (end == std::string::npos) refuse("an open class");
      to_ += posix_class(from_.substr(at_ + 2, end - at_ - 2));
      at_ = end + 2;
      return;
    }
    if (c == ']') in_class_ = false;
    to_ += c, ++at_;
  }

  /// [:name:] as the inside of a class. Those whose characters cannot be named here are refused.
  std::string posix_class(const std::string& name) const {
    if (name == "space") return kSpaces;
    if (name == "^space") return kNoSpaces;
    if (name == "blank") return category("Zs") + R"(\x{9})";
    if (name == "cntrl") return R"(\p{Cc})";
    if (name == "^cntrl") return R"(\P{Cc})";
    if (name == "digit") return category("Nd");
    if (name == "punct") return category("P") + category("S");
    if (name == "word") return word_items(true);
    if (name == "xdigit") return "0-9a-fA-F";
    if (name == "ascii") return R"(\x{0}-\x{7f})";
    refuse("[:" + name + ":]");
  }

  void put(const std::string& items, bool negated) {
    if (in_class_)
      to_ += items;
    else
      to_ += (negated ? "[^" : "[") + items + "]";
  }

  void escape() {
    if (at_ + 1 >= from_.size()) refuse("a backslash without a character");
    const char c = from_[at_ + 1];
    if (c == 's' || c == 'S') {
      put(in_class_ && c == 'S' ? kNoSpaces : kSpaces, c == 'S');
    } else if (c == 'G') {
      refuse("\\G");  // searches begin at positions of their own
    } else if (std::string_view("CEQVX").find(c) != std::string_view::npos) {
      refuse(std::string("\\") + c);  // another thing in each of the two
    } else if ((c == 'b' || c == 'B') && !in_class_) {
      const std::string word = "[" + word_items(false) + "]", before = "(?<=" + word + ")",
                        after = "(?=" + word + ")";
      const std::string none_before = "(?<!" + word + ")", none_after = "(?!" + word + ")";
      to_ += c == 'b' ? "(?:" + before + none_after + "|" + none_before + after + ")"
                      : "(?:" + before + after + "|" + none_before + none_after + ")";
    } else if (c == 'v') {
      to_ += R"(\x{b})";  // all vertical space in PCRE2
    } else if (in_class_ && (c == 'D' || c == 'W' || c == 'H')) {
      refuse(std::string("\\") + c + " in a class");
    } else if (c == 'h' || c == 'H') {
      put("0-9a-fA-F", c == 'H');
    } else if (c == 'd' || c == 'D') {
      put(category("Nd"), c == 'D');
    } else if (c == 'w' || c == 'W') {
      put(word_items(in_class_), c == 'W');
    } else if ((c == 'p' || c == 'P') && at_ + 2 < from_.size() && from_[at_ + 2] == '{') {
      const size_t end = from_.find('}', at_);
      if (end == std::string::npos) refuse("an open \\p{");
      std::string name = from_.substr(at_ + 3, end - at_ - 3);
      const bool caret = name.starts_with('^');
      if (caret) name.erase(0, 1);
      const bool negated = caret != (c == 'P');
      if (in_class_ && negated)
        to_ += "\\P{" + property(name) + "}";
      else
        put(category(name), negated);
      at_ = end + 1;
      return;
    } else {
      to_ += from_.substr(at_, 2);
    }
    at_ += 2;
  }

  const std::string& where_;
  const std::string& from_;
  std::string to_;
  size_t at_ = 0;
  bool in_class_ = false, at_start_ = true;
};

/// What a search needs besides the pattern; one a thread.
struct Workspace {
  Owned<pcre2_match_data, pcre2_match_data_free> match{pcre2_match_data_create(1, nullptr)};
  Owned<pcre2_match_context, pcre2_match_context_free> context{pcre2_match_context_create(nullptr)};
  Owned<pcre2_jit_stack, pcre2_jit_stack_free> stack{
      pcre2_jit_stack_create(kFirstStack, kMostStack, nullptr)};
  Workspace() {
    if (!match || !context || !stack) throw std::bad_alloc();
    pcre2_jit_stack_assign(context.get(), nullptr, stack.get());
  }
};

std::string text_of_error(int code) {
  PCRE2_UCHAR text[256] = {};
  pcre2_get_error_message(code, text, sizeof text);
  return reinterpret_cast<const char*>(text);
}

PCRE2_SPTR bytes_of(std::string_view text) {
  return reinterpret_cast<PCRE2_SPTR>(text.data());
}

}  // namespace

struct Regex::Compiled {
  std::string where, pattern;
  Owned<pcre2_code, pcre2_code_free> code;  // finds a match
  Owned<pcre2_code, pcre2_code_free>
      here;  // the same pattern, which matches at the start position or nowhere
  bool machine_code = false;
};

Regex::Regex(const std::string& where, const std::string& pattern) {
  check(pattern.size() <= kLargestPattern, "tokenizer: ", where, ": a pattern of ", pattern.size(),
        " bytes, more than ", kLargestPattern);
  const std::string text = Translator(where, pattern).run();
  const Owned<pcre2_compile_context, pcre2_compile_context_free> context(
      pcre2_compile_context_create(nullptr));
  if (!context) throw std::bad_alloc();
  pcre2_set_newline(context.get(), PCRE2_NEWLINE_LF);
  auto compiled = std::make_shared<Compiled>();
  compiled->where = where, compiled->pattern = pattern;
  compiled->machine_code = true;
  for (auto* const code : {&compiled->code, &compiled->here}) {
    const uint32_t anchored = code == &compiled->here ? PCRE2_ANCHORED : 0;
    int error = 0;
    PCRE2_SIZE place = 0;
    code->reset(pcre2_compile(bytes_of(text), text.size(), PCRE2_UTF | PCRE2_UCP | PCRE2_MULTILINE | anchored,
                              &error, &place, context.get()));
    check(*code != nullptr, "tokenizer: ", where, ": the pattern \"", shown(pattern),
          "\" is not understood: ", text_of_error(error));
    // Without a compiler for this machine the interpreter gives the same matches, slowly.
    compiled->machine_code &=
        pcre2_jit_compile(code->get(), PCRE2_JIT_COMPLETE | PCRE2_JIT_PARTIAL_HARD) == 0;
  }
  compiled_ = std::move(compiled);
}

bool Regex::available() {
  return true;
}

bool Regex::find(std::string_view text, size_t from, Match& match, Budget& budget) const {
  thread_local Workspace workspace;
  const auto search = compiled_->machine_code ? pcre2_jit_match : pcre2_match;
  const PCRE2_SIZE* const place = pcre2_get_ovector_pointer(workspace.match.get());
  size_t at = from;  // starts before it have no match
  size_t bytes = kFreeBytes;
  uint32_t steps = kFreeSteps;
  size_t one_by_one = at;  // one of the starts before it takes more than the free steps
  const auto go_on_at = [&](size_t start) { at = start, bytes = kFreeBytes, steps = kFreeSteps; };
  const auto charge = [&](uint64_t cost) {
    check(budget.take(cost), "tokenizer: ", compiled_->where, ": the pattern \"", shown(compiled_->pattern),
          "\" fails on this text: it takes more than ", budget.most(), " steps for ", text.size(),
          " bytes, at byte ", at,
          "; use a tokenizer without such a pattern, or cut the text into smaller ones");
  };
  for (;;) {
    // The text ends for PCRE2 where the window does. A match that could be another one if the text went on
    // there is reported as partial, and looked for again in a larger window.
    size_t end = text.size();
    if (bytes < end - at)
      for (end = at + bytes; end < text.size() && (text[end] & 0xC0) == 0x80;) ++end;
    // In a larger window this start alone is tried: the others might all read as far, uncharged.
    const bool whole = end == text.size(), alone = at < one_by_one || bytes > kFreeBytes;
    pcre2_set_match_limit(workspace.context.get(), steps);
    const int found = search((alone ? compiled_->here : compiled_->code).get(), bytes_of(text), end, at,
                             PCRE2_NO_UTF_CHECK | (whole ? 0 : PCRE2_PARTIAL_HARD), workspace.match.get(),
                             workspace.context.get());
    // "$" and its like hold at the end of the window as at that of the text.
    const bool partial = found == PCRE2_ERROR_PARTIAL || (found >= 0 && !whole && place[1] == end);
    if (const size_t start = partial ? pcre2_get_startchar(workspace.match.get()) : at; start > at) {
      go_on_at(start);
    } else if (partial) {
      charge(bytes);
      bytes *= 2;
    } else if (found >= 0) {
      match = {place[0], place[1]};
      return true;
    } else if (found == PCRE2_ERROR_NOMATCH) {
      const size_t next = alone && at < text.size() ? at + unicode::length(text[at]) : end;
      if (alone ? at == text.size() : whole) return false;
      go_on_at(next);
    } else if (found == PCRE2_ERROR_MATCHLIMIT && !alone) {
      one_by_one = end + 1;
    } else if (found == PCRE2_ERROR_MATCHLIMIT) {
      charge(steps);
      steps = steps > UINT32_MAX / 2 ? UINT32_MAX : 2 * steps;
    } else {
      fail_at(Site::here(), "tokenizer: ", compiled_->where, ": the pattern \"", shown(compiled_->pattern),
              "\" fails on this text: ", text_of_error(found));
    }
  }
}

}  // namespace tessera::io
