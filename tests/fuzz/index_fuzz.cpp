#include <cstdlib>

#include "io/shard_index.h"

// Any bytes: an Error, or names of files that lead nowhere else.

using namespace tessera;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  try {
    for (const auto& [name, file] :
         io::parse_shard_index("fuzz", {reinterpret_cast<const char*>(data), size}))
      if (file.empty() || file == ".." || file.find_first_of(std::string("/\\:\0", 4)) != std::string::npos)
        std::abort();
  } catch (const Error&) {
  }
  return 0;
}
