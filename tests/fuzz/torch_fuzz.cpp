#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "io/torch_file.h"
#include "tests/io/torch_bytes.h"

// Any bytes: an Error, or a file of which every tensor loads in less memory than it has.

using namespace tessera;

extern "C" size_t LLVMFuzzerMutate(uint8_t* data, size_t size, size_t limit);

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  try {
    const io::TorchFile file(io::InputFile("fuzz", {reinterpret_cast<const char*>(data), size}));
    for (const io::PickledTensor& tensor : file.entries())
      if (file.load(tensor.name).bytes() > size) std::abort();
  } catch (const Error&) {
  }
  return 0;
}

/// Half of the time the archive is rebuilt around a changed pickle, so that its checksum holds.
extern "C" size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size, size_t limit, unsigned seed) {
  const std::string whole(reinterpret_cast<char*>(data), size);
  const size_t begin = whole.find("\x80\x02"), end = whole.find("PK\3\4", begin);
  if (seed % 2 == 0 || begin == std::string::npos || end == std::string::npos)
    return LLVMFuzzerMutate(data, size, limit);
  std::string pickle = whole.substr(begin, end - begin);
  const size_t old = pickle.size();
  pickle.resize(old + 64);
  pickle.resize(LLVMFuzzerMutate(reinterpret_cast<uint8_t*>(pickle.data()), old, pickle.size()));
  const std::string next = io::test::torch_bytes(pickle);
  if (next.size() > limit) return LLVMFuzzerMutate(data, size, limit);
  std::memcpy(data, next.data(), next.size());
  return next.size();
}
