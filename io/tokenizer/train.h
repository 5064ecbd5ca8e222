#pragma once

#include <cstdint>
#include <string>
#include <vector>

/// Tokenizers made from text, as the content of a tokenizer.json that the library of Hugging Face loads too.

namespace tessera::io {

struct BpeTraining {
  int64_t vocab_size =
      4096;  // tokens in all: special ones, 256 bytes, joined pairs; fewer if nothing is left to join
  int64_t least_count = 2;                               // of a pair that is joined
  std::string pattern = {};                              // where words end, as of a Split; "": GPT-2's
  std::vector<std::string> special = {"<|endoftext|>"};  // get the first numbers
};

/// Byte-level BPE (Sennrich, Haddow, Birch, 2016; Radford et al., 2019): again and again the most frequent
/// pair of neighbours within words is merged, ties going to the lower left, then the lower right id. The same
/// texts give the same bytes, in any order and however they are divided into documents at the ends of words.
/// The merges are those of the library's BpeTrainer with its byte alphabet as the initial one.
///
/// Throws if vocab_size has no room for special tokens and bytes, or a special token is empty or given twice.
std::string train_bpe(const std::vector<std::string>& texts, const BpeTraining& options);

/// A tokenizer with a token per byte, after the special ones: 256 of them, for any text.
std::string byte_tokenizer(const std::vector<std::string>& special = {"<|endoftext|>"});

/// A tokenizer with a token per character of the texts, in the order of their code points; other characters
/// fall back to the 256 byte tokens, so that any text round-trips.
std::string character_tokenizer(const std::vector<std::string>& texts,
                                const std::vector<std::string>& special = {"<|endoftext|>"});

}  // namespace tessera::io
