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
  /// The same without a blank in front of a text, for text after an added token ("legacy": false); null: the
  /// first serves there too.
  std::unique_ptr<SentencePiece> sentencepiece_inside;
  /// Sets the texts of file.added by the normalizer, and from them added_by_id, added_by_text, end and count;
  /// `find` and `text` are those of the model's vocabulary. Throws if two tokens share a number or one has
  /// two.
  void index_added(const std::function<int32_t(const std::string&)>& find,
                   const std::function<std::optional<std::string>(int32_t)>& text);
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
