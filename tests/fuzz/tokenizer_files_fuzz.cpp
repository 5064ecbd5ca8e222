#include <cstdlib>
#include <string_view>

#include "io/tokenizer/file_internal.h"
#include "runtime/error.h"

// Any bytes, as vocab.json and merges.txt with a zero between them, and as vocab.txt: an Error or a sound
// list.

using namespace tessera;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  const size_t zero = text.find('\0');
  const auto is_sound = [](const io::TokenizerFile& file) {
    for (int32_t id = 0; id < file.vocabulary.end(); ++id)
      if (file.vocabulary.has(id) && file.vocabulary.find(file.vocabulary.token(id)) != id) std::abort();
  };
  try {
    if (zero == std::string_view::npos)
      is_sound(io::parse_vocab_txt("vocab.txt", text));
    else
      is_sound(io::parse_vocab_and_merges("vocab.json", text.substr(0, zero), "merges.txt",
                                          text.substr(zero + 1)));
  } catch (const Error&) {
  }
  return 0;
}
