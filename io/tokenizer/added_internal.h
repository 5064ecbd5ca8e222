#pragma once

#include <array>
#include <string_view>
#include <vector>

#include "io/tokenizer/file_internal.h"

namespace tessera::io {

/// A segment of a text: one added token, or the plain text between two of them.
struct Segment {
  size_t begin, end;
  int32_t token;  // -1: plain text
};

/// Finds added tokens before the text is cut by anything else: leftmost, longest first, with the flags of
/// tokenizer.json. A text of n bytes costs at most n times the longest token; a byte that begins no added
/// token costs nothing.
class AddedMatcher {
 public:
  AddedMatcher() = default;
  /// Tokens of `added` whose flag `normalized` is this.
  AddedMatcher(const std::vector<AddedToken>& added, bool normalized);
  bool empty() const { return entries_.empty(); }
  std::vector<Segment> split(std::string_view text) const;

 private:
  const AddedToken* longest_at(std::string_view text, size_t at) const;
  std::vector<AddedToken> entries_;  // in the order of their texts
  std::array<bool, 256> begins_{};
};

}  // namespace tessera::io
