#include <sentencepiece_processor.h>

#include "io/tokenizer/sentencepiece_internal.h"
#include "runtime/error.h"

namespace tessera::io {

struct SentencePiece::Library {
  sentencepiece::SentencePieceProcessor processor;
};

namespace {

void check_status(const sentencepiece::util::Status& status, const std::string& what) {
  check(status.ok(), "tokenizer: ", what, ": SentencePiece: ", status.message());
}

}  // namespace

SentencePiece::SentencePiece(const std::string& path, std::string_view bytes)
    : library_(std::make_unique<Library>()) {
  try {
    check_status(library_->processor.LoadFromSerializedProto(bytes), path);
  } catch (const Error&) {
    throw;
  } catch (const std::exception& error) {
    fail_at(Site::here(), "tokenizer: ", path, ": SentencePiece: ", error.what());
  }
}

SentencePiece::~SentencePiece() = default;

bool SentencePiece::available() {
  return true;
}

void SentencePiece::encode(std::string_view text, std::vector<int32_t>& ids) const {
  std::vector<int> found;
  check_status(library_->processor.Encode(text, &found),
               "a text of " + std::to_string(text.size()) + " bytes");
  ids.insert(ids.end(), found.begin(), found.end());
}

std::string SentencePiece::decode(std::span<const int32_t> ids) const {
  std::string text;
  check_status(library_->processor.Decode(std::vector<int>(ids.begin(), ids.end()), &text),
               std::to_string(ids.size()) + " tokens");
  return text;
}

int32_t SentencePiece::size() const {
  return library_->processor.GetPieceSize();
}

std::string SentencePiece::piece(int32_t id) const {
  return library_->processor.IdToPiece(id);
}

int32_t SentencePiece::id_of(std::string_view piece) const {
  const int id = library_->processor.PieceToId(piece);
  return id >= 0 && id < size() && library_->processor.IdToPiece(id) == piece ? id : -1;
}

bool SentencePiece::is_control(int32_t id) const {
  return library_->processor.IsControl(id);
}

int32_t SentencePiece::bos() const {
  return library_->processor.bos_id();
}
int32_t SentencePiece::eos() const {
  return library_->processor.eos_id();
}
int32_t SentencePiece::unk() const {
  return library_->processor.unk_id();
}
int32_t SentencePiece::pad() const {
  return library_->processor.pad_id();
}

}  // namespace tessera::io
