#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

/// Tokens and their numbers, in little more memory than their bytes: a vocabulary comes from a file that
/// is not validated.

namespace tessera::io {

/// Limit on the number of tokens: 4 million. No tokenizer in use has a quarter of that.
inline constexpr int64_t kMostTokens = int64_t{1} << 22;

class Vocabulary {
 public:
  /// Throws, naming `where`, if the token is there already or the number is outside [0, kMostTokens).
  void add(const std::string& where, std::string_view token, int64_t id);
  /// Once all are added: throws if two tokens have one number.
  void finish(const std::string& where);

  int32_t count() const { return int32_t(ids_.size()); }
  /// The largest id plus 1.
  int32_t end() const { return end_; }
  /// The number of a token, or -1.
  int32_t find(std::string_view token) const;
  bool has(int32_t id) const { return id >= 0 && id < end_ && by_id_[size_t(id)] != 0; }
  /// The token of a number; "" if there is none.
  std::string_view token(int32_t id) const;
  size_t longest() const { return longest_; }

 private:
  std::string_view entry(size_t i) const {
    return std::string_view(bytes_).substr(ends_[i], ends_[i + 1] - ends_[i]);
  }
  size_t slot(std::string_view token) const;
  void grow();

  std::string bytes_;
  std::vector<uint32_t> ends_{0};
  std::vector<int32_t> ids_;     // of the entries, in the order of add
  std::vector<uint32_t> slots_;  // entry + 1 by hash, 0 is free
  std::vector<uint32_t> by_id_;  // entry + 1 by number
  int32_t end_ = 0;
  size_t longest_ = 0;
};

/// For tables of words: quick, and good enough in its low bits.
inline uint64_t hash_of(std::string_view text) {
  uint64_t hash = 0x9E3779B97F4A7C15 ^ text.size();
  size_t at = 0;
  const auto mix = [&hash](uint64_t word) {
    hash = (hash ^ word) * 0xFF51AFD7ED558CCD;
    hash ^= hash >> 32;
  };
  for (; at + 8 <= text.size(); at += 8) {
    uint64_t word = 0;
    __builtin_memcpy(&word, text.data() + at, 8);
    mix(word);
  }
  if (at < text.size()) {
    uint64_t word = 0;
    __builtin_memcpy(&word, text.data() + at, text.size() - at);
    mix(word);
  }
  return hash;
}

}  // namespace tessera::io
