#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::io {

/// A SentencePiece model, encoded and decoded by its library (sentencepiece_library.cpp; a build without it
/// throws, sentencepiece_absent.cpp).
class SentencePiece {
 public:
  /// `bytes` have passed check_sentencepiece. Throws, naming `path`, if the library refuses them.
  SentencePiece(const std::string& path, std::string_view bytes);
  ~SentencePiece();
  /// Whether this build has the library.
  static bool available();
  void encode(std::string_view text, std::vector<int32_t>& ids) const;
  std::string decode(std::span<const int32_t> ids) const;
  int32_t size() const;
  std::string piece(int32_t id) const;
  int32_t id_of(std::string_view piece) const;  // -1: none
  bool is_control(int32_t id) const;            // has no text
  int32_t bos() const;                          // -1: none
  int32_t eos() const;
  int32_t unk() const;
  int32_t pad() const;

 private:
  struct Library;
  std::unique_ptr<Library> library_;
};

}  // namespace tessera::io
