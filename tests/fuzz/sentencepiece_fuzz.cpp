#include <cstdlib>

#include "io/tokenizer/tokenizer.h"
#include "runtime/error.h"

// Any bytes: an Error, or a model that the library encodes and decodes with.

using namespace tessera;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  try {
    const io::Tokenizer tokenizer =
        io::Tokenizer::parse_sentencepiece("fuzz", {reinterpret_cast<const char*>(data), size});
    const io::Encoding encoding = tokenizer.encode(" The a\xC3\xA9\xFF\n12");
    for (const int32_t id : encoding.ids)
      if (!tokenizer.has(id)) std::abort();
    tokenizer.decode(encoding.ids);
  } catch (const Error&) {
  }
  return 0;
}
