#include <cstdlib>

#include "io/unpickle.h"

// Any bytes: an Error, or tensors that lie within their storages.

using namespace tessera;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  try {
    for (const io::PickledTensor& tensor :
         io::read_state_dict("fuzz", {reinterpret_cast<const char*>(data), size})) {
      const uint64_t end = uint64_t(tensor.layout.offset) + uint64_t(tensor.layout.extent());
      if (end > tensor.storage_elements || uint64_t(tensor.layout.shape.count()) > tensor.storage_elements)
        std::abort();
    }
  } catch (const Error&) {
  }
  return 0;
}
