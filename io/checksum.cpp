#include "io/checksum.h"

#include <xxhash.h>

namespace tessera::io {

struct Xxh3::State {
  XXH3_state_t state;
};

Xxh3::Xxh3() : state_(std::make_unique<State>()) {
  XXH3_128bits_reset(&state_->state);
}

Xxh3::~Xxh3() = default;

void Xxh3::add(const void* data, size_t bytes) {
  if (bytes) XXH3_128bits_update(&state_->state, data, bytes);
}

std::string Xxh3::digits() const {
  XXH128_canonical_t canonical;
  XXH128_canonicalFromHash(&canonical, XXH3_128bits_digest(&state_->state));
  std::string digits;
  for (const unsigned char byte : canonical.digest) {
    digits += "0123456789abcdef"[byte >> 4];
    digits += "0123456789abcdef"[byte & 15];
  }
  return digits;
}

}  // namespace tessera::io
