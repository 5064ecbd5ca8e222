#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <random>
#include <string>
#include <vector>

#include "io/file.h"
#include "tensor/tensor.h"
#include "tests/errors.h"
#include "tests/folder.h"

/// What the tests of io share: folders of their own, raw files, and what an error says.

namespace tessera::io::test {

namespace fs = std::filesystem;

/// The system's calls again when a test ends, however it ends.
struct RestoreFileCalls {
  ~RestoreFileCalls() { file_calls() = FileCalls::system(); }
};

/// `f` throws an error whose message has this part.
template <class F>
::testing::AssertionResult throws(F&& f, const std::string& part) {
  const std::string text = message_of(f);
  if (text.empty()) return ::testing::AssertionFailure() << "nothing was thrown, expected: " << part;
  if (text.find(part) == std::string::npos)
    return ::testing::AssertionFailure() << "expected: " << part << "\nthrown:   " << text;
  return ::testing::AssertionSuccess();
}

/// A packed CPU tensor with random bits (0 or 1 for bool: other bytes are no bool).
inline Tensor random_bits(const Shape& shape, DType dtype, uint32_t seed) {
  Tensor tensor = Tensor::empty_packed(shape, dtype, Device::cpu());
  std::mt19937 random(seed);
  auto* const bytes = static_cast<uint8_t*>(tensor.raw());
  for (size_t i = 0; i < tensor.bytes(); ++i)
    bytes[i] = uint8_t(random() & (dtype == DType::boolean ? 1 : 255));
  return tensor;
}

/// The elements in row-major order, as bytes: NaN payloads count.
inline std::string bits_of(const Tensor& tensor) {
  const Tensor packed = tensor.detach().to(Device::cpu()).packed();
  return std::string(static_cast<const char*>(packed.raw()), packed.bytes());
}

inline ::testing::AssertionResult same(const Tensor& a, const Tensor& b) {
  if (a.dtype() != b.dtype() || !(a.shape() == b.shape()))
    return ::testing::AssertionFailure() << describe(a) << " against " << describe(b);
  if (bits_of(a) != bits_of(b)) return ::testing::AssertionFailure() << describe(a) << ": elements differ";
  return ::testing::AssertionSuccess();
}

inline const std::vector<DType>& all_dtypes() {
  static const std::vector<DType> dtypes = {DType::f64, DType::f32, DType::bf16, DType::f16,    DType::f8e4m3,
                                            DType::i64, DType::i32, DType::u8,   DType::boolean};
  return dtypes;
}

/// A JSON header with its length before it, and bytes after it.
inline std::string safetensors_bytes(const std::string& header, const std::string& data = "") {
  const uint64_t length = header.size();
  std::string bytes(8, '\0');
  std::memcpy(bytes.data(), &length, 8);
  return bytes + header + data;
}

/// Bytes that a reader must refuse, and parts of its message.
struct Malformed {
  const char* what;
  std::string bytes, error;
};

inline std::string repeated(const std::string& text, size_t count) {
  std::string all;
  for (size_t i = 0; i < count; ++i) all += text;
  return all;
}

}  // namespace tessera::io::test
