#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>

#include "io/checksum.h"

/// Mutators that keep the outer form of a file, so that libFuzzer's changes reach the code after its first
/// checks.

extern "C" size_t LLVMFuzzerMutate(uint8_t* data, size_t size, size_t limit);

namespace tessera::fuzz {

inline uint64_t header_length(const uint8_t* data, size_t size) {
  uint64_t length = 0;
  if (size >= 8) std::memcpy(&length, data, 8);
  return length;
}

/// Mutates header or payload alone and makes the length right; one time in eight, anything.
inline size_t mutate_safetensors(uint8_t* data, size_t size, size_t limit, unsigned seed) {
  const uint64_t length = header_length(data, size);
  if (seed % 8 == 0 || size < 8 || length > size - 8) return LLVMFuzzerMutate(data, size, limit);
  std::string header(reinterpret_cast<char*>(data) + 8, size_t(length));
  std::string payload(reinterpret_cast<char*>(data) + 8 + length, size - 8 - size_t(length));
  std::string& part = seed % 8 < 6 ? header : payload;
  const size_t old = part.size();
  part.resize(old + (limit - size));
  part.resize(LLVMFuzzerMutate(reinterpret_cast<uint8_t*>(part.data()), old, part.size()));
  const uint64_t new_length = header.size();
  std::memcpy(data, &new_length, 8);
  std::copy(header.begin(), header.end(), data + 8);
  std::copy(payload.begin(), payload.end(), data + 8 + header.size());
  return 8 + header.size() + payload.size();
}

/// Writes the digits of `hash` after the first `mark`, if they have room.
inline void put_digits(std::string& head, const std::string& mark, const std::string& digits) {
  const size_t place = head.find(mark);
  if (place != std::string::npos && head.size() - place - mark.size() >= digits.size())
    head.replace(place + mark.size(), digits.size(), digits);
}

/// Makes the checksum of the tensor "weight", if it is the whole payload, and of the head right.
inline size_t seal(uint8_t* data, size_t size) {
  const uint64_t length = header_length(data, size);
  if (size < 8 || length > size - 8) return size;
  std::string head(reinterpret_cast<char*>(data), 8 + size_t(length));
  io::Xxh3 payload, whole;
  payload.add(data + head.size(), size - head.size());
  put_digits(head, "\"weight\":\"xxh3 ", payload.digits());
  const std::string mark = "\"tessera.checksum\":\"xxh3 ";
  put_digits(head, mark, std::string(io::Xxh3::kDigits, '0'));
  whole.add(head);
  put_digits(head, mark, whole.digits());
  std::copy(head.begin(), head.end(), data);
  return size;
}

}  // namespace tessera::fuzz
