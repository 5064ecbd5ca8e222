#include <cstdlib>
#include <string_view>

#include "io/tokenizer/tokenizer.h"
#include "runtime/error.h"

// Any bytes: an Error, or a tokenizer whose tokens are its own and whose text is UTF-8.

using namespace tessera;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  try {
    const io::Tokenizer tokenizer = io::Tokenizer::parse("fuzz", {reinterpret_cast<const char*>(data), size});
    for (const std::string_view text : {"a b<s>", "\xC3\xA9\xFF 12"}) {
      const io::Encoding encoding = tokenizer.encode_pair(text, "it's", {.max_length = 64});
      if (encoding.types.size() != encoding.ids.size()) std::abort();
      for (const int32_t id : encoding.ids)
        if (!tokenizer.has(id) || id >= tokenizer.vocab_size()) std::abort();
      tokenizer.decode(encoding.ids);
      io::TokenStream stream(tokenizer, false);
      for (const int32_t id : encoding.ids) stream.next(id);
      stream.finish();
    }
  } catch (const Error&) {
  }
  return 0;
}
