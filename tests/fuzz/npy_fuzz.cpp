#include <cstdlib>

#include "io/npy.h"

// Any bytes: an Error, or an array.

using namespace tessera;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  try {
    const Tensor tensor = io::load_npy(io::InputFile("fuzz", {reinterpret_cast<const char*>(data), size}));
    if (!tensor.defined() || tensor.bytes() >= size) std::abort();
  } catch (const Error&) {
  }
  return 0;
}
