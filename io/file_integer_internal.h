#pragma once

#include <string>
#include <string_view>

#include "io/file.h"
#include "tensor/tensor.h"

/// Integers in files that no dtype has. They are read into the narrowest dtype that holds all of their
/// values, those of 64 bits without a sign into i64, which holds the lower half.

namespace tessera::io {

struct FileInteger {
  const char* safetensors;  // "I16"
  const char* npy;          // "<i2"
  DType dtype;              // of the tensor
  size_t bytes;             // per element in the file
};

/// By its name in the format that `names` says, &FileInteger::npy or &FileInteger::safetensors; null if it is
/// none of them.
const FileInteger* find_file_integer(const char* FileInteger::*names, std::string_view name);

/// Elements of the file from `offset` on as a packed host tensor of that shape. Throws, naming file, tensor
/// and element, if a value does not fit.
Tensor read_file_integers(const InputFile& file, uint64_t offset, const FileInteger& integer,
                          const Shape& shape, const std::string& name);

}  // namespace tessera::io
