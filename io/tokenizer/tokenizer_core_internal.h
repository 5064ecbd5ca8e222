#pragma once

#include <unordered_map>

#include "io/tokenizer/added_internal.h"
#include "io/tokenizer/decoder_internal.h"
#include "io/tokenizer/model_internal.h"
#include "io/tokenizer/post_processor_internal.h"
#include "io/tokenizer/pre_tokenizer_internal.h"
#include "io/tokenizer/sentencepiece_internal.h"
#include "io/tokenizer/tokenizer.h"

namespace tessera::io {

/// What the copies of a tokenizer share.
struct Tokenizer::Core {
  TokenizerFile file;
  Normalizer normalizer;
  PreTokenizer pre_tokenizer;
  std::optional<TokenModel> model;
  std::unique_ptr<SentencePiece> sentencepiece;  // instead of the others
  PostProcessor post_processor;
  Decoder decoder;
  AddedMatcher raw_added, normalized_added;
  std::unordered_map<int32_t, const AddedToken*> added_by_id;
  std::unordered_map<std::string_view, int32_t> added_by_text;
  int64_t end = 0, count = 0;
  SpecialTokens special;
  std::string fingerprint, kind;
};

}  // namespace tessera::io
