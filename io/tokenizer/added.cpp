#include <algorithm>

#include "io/tokenizer/added_internal.h"
#include "io/tokenizer/unicode_internal.h"

namespace tessera::io {
namespace {

bool ends_with_word(std::string_view text) {
  size_t at = text.size();
  return at > 0 && unicode::is_word(unicode::previous(text, at));
}

bool starts_with_word(std::string_view text) {
  size_t at = 0;
  return !text.empty() && unicode::is_word(unicode::next(text, at));
}

}  // namespace

AddedMatcher::AddedMatcher(const std::vector<AddedToken>& added, bool normalized) {
  for (const AddedToken& token : added)
    if (token.normalized == normalized && !token.text.empty()) entries_.push_back(token);
  std::ranges::stable_sort(entries_, {}, &AddedToken::text);
  for (const AddedToken& entry : entries_) begins_[static_cast<unsigned char>(entry.text[0])] = true;
}

const AddedToken* AddedMatcher::longest_at(std::string_view text, size_t at) const {
  // The entries that begin as the text does, byte by byte fewer.
  const AddedToken* found = nullptr;
  auto first = entries_.begin(), last = entries_.end();
  for (size_t depth = 0; at + depth < text.size() && first != last; ++depth) {
    const auto byte = static_cast<unsigned char>(text[at + depth]);
    const auto of = [depth](const AddedToken& entry) {
      return entry.text.size() > depth ? int(static_cast<unsigned char>(entry.text[depth])) : -1;
    };
    first = std::partition_point(first, last, [&](const AddedToken& entry) { return of(entry) < byte; });
    last = std::partition_point(first, last, [&](const AddedToken& entry) { return of(entry) <= byte; });
    if (first != last && first->text.size() == depth + 1) found = &*first;
  }
  return found;
}

std::vector<Segment> AddedMatcher::split(std::string_view text) const {
  std::vector<Segment> segments;
  size_t taken = 0;       // up to here the text is in segments
  size_t blanks_end = 0;  // of those that the last token with rstrip took: a long run is looked at once
  for (size_t at = 0; at < text.size();) {
    const AddedToken* const entry =
        begins_[static_cast<unsigned char>(text[at])] ? longest_at(text, at) : nullptr;
    if (!entry) {
      at += 1;
      continue;
    }
    size_t begin = at, end = at + entry->text.size();
    at = end;
    if (entry->single_word && (ends_with_word(text.substr(0, begin)) || starts_with_word(text.substr(end))))
      continue;
    if (entry->lstrip) {
      while (begin > taken) {
        size_t before = begin;
        if (!unicode::is_space(unicode::previous(text, before))) break;
        begin = before;
      }
      begin = std::max(begin, taken);
    }
    if (entry->rstrip) {
      end = std::max(end, blanks_end);
      while (end < text.size()) {
        size_t behind = end;
        if (!unicode::is_space(unicode::next(text, behind))) break;
        end = behind;
      }
      blanks_end = end;
    }
    if (begin > taken) segments.push_back({taken, begin, -1});
    // A token of blanks counts as well where the one before took its blanks, as in the library `tokenizers`.
    if (begin < end) segments.push_back({begin, end, entry->id});
    taken = end;
  }
  if (taken < text.size()) segments.push_back({taken, text.size(), -1});
  return segments;
}

}  // namespace tessera::io
