#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "io/tokenizer/tokenizer.h"

/// Text files to shards of tokens.

namespace tessera::datasets {

struct TokenizeOptions {
  double validation = 0.1;                  // share at the end of each document, see split_text
  int64_t piece = 0;                        // bytes of a document, see split_pieces; 0: a whole file
  int64_t shard_tokens = int64_t{1} << 27;  // a shard is closed when it has so many
  int workers = 1;                          // threads; the files are the same
  bool any_bytes = false;                   // do not refuse what is not UTF-8 text (io/text_file.h)
};

struct TokenizedPart {
  uint64_t tokens = 0, documents = 0, empty_documents = 0;  // of the shards; the empty ones are among all
  int64_t shards = 0;
};
struct Tokenized {
  TokenizedPart train, validation;
  uint64_t bytes = 0;     // of the texts
  uint64_t invalid = 0;   // bytes among them that are not UTF-8; each sequence of them became U+FFFD
  uint64_t one_line = 0;  // documents of one line, whose last share was cut off at a space
};

/// Throws if the folder has shards of tokens.
void check_no_shards(const std::string& folder);

/// Each file, or piece of one, is a document of the part "train"; its last share is the document of the same
/// number in the part "validation". Either of the two may have no tokens. A document ends with the
/// tokenizer's end token, if it has one. Makes the folder. Throws if it has shards already; an error leaves
/// no shard.
Tokenized tokenize_files(const std::vector<std::string>& paths, const io::Tokenizer& tokenizer,
                         const std::string& folder, const TokenizeOptions& options = {});

/// Size limit of a text file in bytes.
inline constexpr uint64_t kLargestText = uint64_t{1} << 32;

}  // namespace tessera::datasets
