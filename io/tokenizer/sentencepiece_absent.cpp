#include "io/tokenizer/sentencepiece_internal.h"
#include "runtime/error.h"

// In place of sentencepiece_library.cpp where the library is missing.

namespace tessera::io {

struct SentencePiece::Library {};

SentencePiece::SentencePiece(const std::string& path, std::string_view) {
  fail_at(Site::here(), "tokenizer: ", path,
          " needs SentencePiece, which this build lacks; install libsentencepiece-dev and build again, or "
          "use the "
          "model's tokenizer.json");
}

SentencePiece::~SentencePiece() = default;
bool SentencePiece::available() {
  return false;
}
void SentencePiece::encode(std::string_view, std::vector<int32_t>&) const {}
std::string SentencePiece::decode(std::span<const int32_t>) const {
  return {};
}
int32_t SentencePiece::size() const {
  return 0;
}
std::string SentencePiece::piece(int32_t) const {
  return {};
}
int32_t SentencePiece::id_of(std::string_view) const {
  return -1;
}
bool SentencePiece::is_control(int32_t) const {
  return false;
}
int32_t SentencePiece::bos() const {
  return -1;
}
int32_t SentencePiece::eos() const {
  return -1;
}
int32_t SentencePiece::unk() const {
  return -1;
}
int32_t SentencePiece::pad() const {
  return -1;
}

}  // namespace tessera::io
