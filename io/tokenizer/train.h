#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

/// Tokenizers made from text, as the content of a tokenizer.json that the library of Hugging Face loads too.

namespace tessera::io {

struct BpeTraining {
  int64_t vocab_size =
      4096;  // tokens in all: special ones, 256 bytes, joined pairs; fewer if nothing is left to join
  int64_t least_count = 2;                               // of a pair that is joined
  std::string pattern;                                   // where words end, as of a Split; "": GPT-2's
  std::vector<std::string> special = {"<|endoftext|>"};  // get the first numbers
};

/// Byte-level BPE (Sennrich, Haddow, Birch, 2016; Radford et al., 2019): of all pairs of neighbours within
/// words the most frequent is joined, again and again; of equally frequent ones that of the lower left, then
/// right number. The same texts give the same bytes, in any order and however cut: between documents no word
/// goes on. Also the merges of the library's BpeTrainer with its byte alphabet as the initial one.
///
/// Throws if vocab_size has no room for special tokens and bytes, or a special token is empty or given twice.
std::string train_bpe(const std::vector<std::string>& texts, const BpeTraining& options);

/// Every byte a token, after the special ones: 256 of them, for any text.
std::string byte_tokenizer(const std::vector<std::string>& special = {"<|endoftext|>"});

/// Every character of the texts a token, in the order of their code points; others fall back to the 256
/// tokens of bytes, so any text comes back whole.
std::string character_tokenizer(const std::vector<std::string>& texts,
                                const std::vector<std::string>& special = {"<|endoftext|>"});

}  // namespace tessera::io
