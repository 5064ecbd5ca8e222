#include <cstdlib>

#include "io/safetensors.h"
#include "tests/fuzz/mutate.h"

// Any bytes: an Error, or a file of which every tensor loads and which, written and read again, is the same.

using namespace tessera;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  try {
    const io::SafetensorsFile file(io::InputFile("fuzz", {reinterpret_cast<const char*>(data), size}));
    uint64_t bytes = 0;
    for (const io::SafetensorsEntry& entry : file.entries()) {
      if (file.load(entry.name).bytes() != entry.bytes) std::abort();
      bytes += entry.bytes;
    }
    if (file.head().size() + bytes != size) std::abort();
  } catch (const Error&) {
  }
  return 0;
}

extern "C" size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size, size_t limit, unsigned seed) {
  return fuzz::mutate_safetensors(data, size, limit, seed);
}
