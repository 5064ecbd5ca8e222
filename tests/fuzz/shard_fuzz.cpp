#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <string>

#include "datasets/token_shard.h"
#include "io/checksum.h"
#include "runtime/error.h"

// Any bytes in a file: an Error, or a shard of which every token is in its vocabulary.

using namespace tessera;

extern "C" size_t LLVMFuzzerMutate(uint8_t* data, size_t size, size_t limit);

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const int file = ::memfd_create("shard", 0);
  static const std::string path = "/proc/self/fd/" + std::to_string(file);
  if (::ftruncate(file, 0) != 0 || ::pwrite(file, data, size, 0) != ssize_t(size)) std::abort();
  for (const bool verify : {true, false}) {
    try {
      const datasets::TokenShard shard(path, verify);
      if (shard.info().tokens > size) std::abort();
      std::vector<int64_t> tokens(size_t(shard.info().tokens));
      shard.read(0, tokens);
      for (const int64_t token : tokens)
        if (token < 0 || uint64_t(token) >= shard.info().vocab_size) std::abort();
      for (const uint64_t border : shard.borders(0, shard.info().tokens))
        if (border == 0 || border >= shard.info().tokens) std::abort();
    } catch (const Error&) {
    }
  }
  return 0;
}

/// Seven times in eight the checksums are made right.
extern "C" size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size, size_t limit, unsigned seed) {
  size = LLVMFuzzerMutate(data, size, limit);
  if (seed % 8 == 0 || size < 128) return size;
  const auto digits = [&](size_t begin, size_t end) {
    io::Xxh3 hash;
    hash.add(data + begin, end - begin);
    return hash.digits();
  };
  const std::string content = digits(128, size);
  std::copy(content.begin(), content.end(), data + 80);
  std::memcpy(data, "TESSTOK1", 8);
  const std::string head = digits(0, 112);
  std::copy_n(head.begin(), 16, data + 112);
  return size;
}
